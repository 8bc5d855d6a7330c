"""Recipes: what is right is resolved, what is wrong is said precisely, and nothing starts."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from argosy.deploy.recipe import PRESETS, RECIPES, Recipe, RecipeError, describe, load

MISTAKES = {
    "buffer.batchsize=3": "unknown key 'buffer.batchsize': did you mean 'batch_size'?",
    "learner.polcy.lr=1e-3": "unknown key 'learner.polcy': did you mean 'policy'?",
    "zzz=1": "unknown key 'zzz': the keys here are name, model, tasks",
    "learner.policy.lr=fast": "learner.policy.lr: Input should be a valid number",
    "learner.stop.steps=0": "learner.stop.steps: Input should be greater than 0, not 0",
    "learner.objective.name=grop": "learner.objective: no objective 'grop': did you mean 'grpo'?",
    "learner.objective.dual=3": "learner.objective: objective 'dis' has no setting dual; it has high, low",
    "learner.objective.low=0": "learner.objective.low: Input should be greater than 0, not 0",
    "learner.objective.name=nowhere.module:loss": "cannot import 'nowhere.module'",
    "learner.correction.name=tis": "dis weighs by the engine's probabilities itself: with tis they would count twice",
    "learner.advantage={name: grpo}": "value pretrains a critic that no advantage uses",
    "learner.per_source={repare: {}}": "learner.per_source: repare is no name of a source among tasks",
    "learner.per_source={repair: {objektive: {}}}": "did you mean 'objective'?",
    "learner.per_source={repair: {objective: {name: gspo}}}": "per_source.repair: gspo needs one advantage",
    "learner.per_source={repair: {advantage: {name: rloo}}}": "rloo compares the attempts of a group",
    "actor.segment_tokens=0": "actor.segment_tokens: Input should be greater than or equal to 1, not 0",
    "buffer.order=newest": "buffer.order: must be oldest, freshest, or a function as package.module:function",
    "tasks.0.env=argosy/repare": "task source 'repair': no environment 'argosy/repare': did you mean 'argosy/repair'?",
    "tasks.0.env=nowhere.module:Env": "task source 'repair': cannot import 'nowhere.module'",
    "tasks.0.kwargs.level=9": "repair has levels 1 to 5",
    "tasks.0.kwargs.size=9": "task source 'repair'",
    "tasks.3.env=x": "'3' must be a number below 1",
    "tasks=[]": "tasks:",
    "model.path=/nowhere": "give either a path to a model or scratch",
    "model={path: /nowhere}": "/nowhere is not a Hugging Face model directory",
    "demonstrations=0": "demonstrations and learner.supervised need each other",
    "evaluation.0.name=repair": "must all have different names",
    "buffer.url=redis://example.com": "example.com is remote",
    "name=../elsewhere": "name:",
    "name=..": "name:",
    "tasks.0.kwargs={a: [": "the value is not YAML",
    "learner.stop": "write key=value",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_names_the_key_and_what_is_allowed(override: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load("demo", [override], runs=tmp_path)
    assert MISTAKES[override] in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_episodes_may_not_be_longer_than_the_model_can_look_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 700}')
    changes = [f"model={{path: {tmp_path}}}", "demonstrations=0", "learner.supervised=null"]
    with pytest.raises(RecipeError, match=r"actor\.context_tokens: 768 is more than the 700 of the model"):
        load("demo", changes, runs=tmp_path)
    load("demo", [*changes, "actor.context_tokens=700"], runs=tmp_path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\nmodel: {scratch: {}}\ntasks: [{name: a, env: argosy/repair}]\nbuffer: {batch_size: 4}\n"
    )
    with pytest.raises(RecipeError, match="'learner' is missing"):
        load(str(recipe))


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nname: yours\n")
    with pytest.raises(RecipeError, match="name is given twice"):
        load(str(recipe))


def test_an_unknown_recipe_lists_those_that_exist() -> None:
    with pytest.raises(RecipeError, match="demo"):
        load("dmeo")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_that_comes_along_is_valid_and_short(recipe: str) -> None:
    checked, paths = load(recipe)
    assert checked.name == recipe == paths.root.name
    assert len((RECIPES / f"{recipe}.yaml").read_text().splitlines()) < 40


def test_overrides_reach_values_lists_and_absent_parts() -> None:
    checked, _ = load("demo", ["learner.policy.lr=1e-3", "tasks.0.kwargs.level=2", "processes.actors=2", "name=other"])
    assert checked.learner.policy.lr == 1e-3
    assert checked.tasks[0].kwargs == {"level": 2}
    assert checked.processes.actors == 2
    assert checked.buffer.run == "other"


def test_the_description_is_the_recipe_itself_with_a_meaning_for_every_setting() -> None:
    checked, _ = load("demo")
    lines = list(describe(checked))
    assert Recipe.model_validate(yaml.safe_load("\n".join(lines))) == checked
    for before, line in itertools.pairwise(lines):
        if ":" in line and not line.strip().startswith(("#", "-")):
            assert before.strip().startswith("#"), f"no meaning is given for {line.strip()!r}"


def test_the_command_fails_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "argosy.deploy.cli", "train", "demo", "buffer.etta=3"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "did you mean 'eta'?" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_segments_need_single_rollouts_and_a_critic() -> None:
    with pytest.raises(RecipeError, match=r"segment_tokens=40 needs .*group_size=1, not 2"):
        load("demo", ["actor.segment_tokens=40", "buffer.group_size=2"])
    with pytest.raises(RecipeError, match="segment_tokens needs a critic"):
        load(
            "demo",
            ["actor.segment_tokens=40", "buffer.group_size=2", "learner.advantage={name: grpo}", "learner.value=null"],
        )
    load("demo", ["actor.segment_tokens=40"])


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_a_preset_is_what_a_recipe_goes_on_from(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"preset: {preset}\nname: mine\nmodel: {{path: {tmp_path}}}\ntasks: [{{name: a, env: argosy/repair}}]\n"
        "buffer: {batch_size: 8}\nlearner: {stop: {steps: 3}, policy: {beta1: 0.5}}\n"
    )
    checked, _ = load(str(recipe))
    assert (checked.learner.policy.lr, checked.learner.policy.beta1, checked.buffer.batch_size) == (1e-6, 0.5, 8)
    assert (checked.buffer.group_size == 1) == checked.learner.uses_critic == (preset == "sao")
    other, _ = load(str(recipe), ["learner.objective={name: cispo}"])
    assert other.learner.objective.low is None


def test_a_preset_that_does_not_exist_is_said() -> None:
    with pytest.raises(RecipeError, match="no preset 'sap': there are dapo, glm5, gspo, sao"):
        load("demo", ["preset=sap"])
