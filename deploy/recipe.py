"""A recipe: one short YAML file that says everything about a run, checked before anything starts.

Invariant: what `load` returns has been checked as a whole; a mistake is a `RecipeError` that names the key, the place
and what is allowed. Each part's settings belong to the folder that uses them; this file only composes them.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..actors.settings import ActorConfig, ActorSettings, EngineSettings, TaskSource
from ..buffer import BufferSettings
from ..envs import EnvError, make_env
from ..learner.settings import LearnerSettings
from .paths import RunPaths

RECIPES = Path(__file__).parent / "recipes"
PRESETS = Path(__file__).parent / "presets"


class RecipeError(ValueError):
    """The recipe is wrong: what, where, and what would be right. Nothing has started."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ScratchModel(Part):
    """A small Qwen3 with random weights, and a tokenizer trained on what the environments say."""

    vocabulary: int = Field(default=512, ge=263)
    """Size of the tokenizer, in tokens."""
    hidden: int = Field(default=96, ge=8)
    """Width of the model."""
    layers: int = Field(default=2, ge=1)
    """Number of transformer layers."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; half as many keep keys and values."""


class ModelSettings(Part):
    path: Path | None = None
    """Hugging Face directory of the model to train."""
    scratch: ScratchModel | None = None
    """Make a new small model instead."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give either a path to a model or scratch")
        if self.path is not None and not (self.path / "config.json").exists():
            raise ValueError(f"{self.path.absolute()} is not a Hugging Face model directory: it has no config.json")
        return self

    @property
    def context(self) -> int | None:
        """Tokens that a model at `path` can look back on; None where it does not say, and for one that is made."""
        if self.path is None:
            return None
        found: int | None = json.loads((self.path / "config.json").read_text()).get("max_position_embeddings")
        return found


class Evaluation(TaskSource):
    episodes: int = Field(default=200, ge=1)
    """Episodes played before and after training, on the seeds from 0."""


class Processes(Part):
    engines: int = Field(default=1, ge=1)
    """SGLang servers."""
    actors: int = Field(default=1, ge=1)
    """Actor processes, each with actor.concurrency episodes."""
    learners: int = Field(default=1, ge=1)
    """Ranks of the learner, started with torchrun when there are several."""


class Recipe(Part):
    """Beside these, `preset` may name a published combination of settings (deploy/presets) to go on from."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run; its files are in runs/<name>."""
    model: ModelSettings
    """Where the policy comes from."""
    tasks: tuple[TaskSource, ...] = Field(min_length=1)
    """What is trained on: environments, mixed by weight."""
    evaluation: tuple[Evaluation, ...] = ()
    """What is measured before and after, and never trained on."""
    demonstrations: int = Field(default=0, ge=0)
    """Episodes of the environments' own experts, made for the learner's supervised stage."""
    processes: Processes = Processes()
    """How many of each kind run on this machine."""
    buffer: BufferSettings
    """The replay buffer; without a url the run starts a Redis of its own."""
    engine: EngineSettings = EngineSettings()
    """Each SGLang server."""
    actor: ActorSettings = ActorSettings()
    """Each actor."""
    learner: LearnerSettings
    """The learner."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.learner.supervised is not None) != (self.demonstrations > 0):
            raise ValueError("demonstrations and learner.supervised need each other: give both or neither")
        if unknown := set(self.learner.per_source) - {source.name for source in self.tasks}:
            raise ValueError(f"learner.per_source: {', '.join(sorted(unknown))} is no name of a source among tasks")
        for source in self.tasks:
            advantage = self.learner.method(source.name).advantage
            if advantage.by_group and self.buffer.group_size < 2:
                raise ValueError(
                    f"{advantage.name} compares the attempts of a group: set buffer.group_size to 2 or more, not "
                    f"{self.buffer.group_size}"
                )
        if self.actor.segment_tokens is not None and not all(
            self.learner.method(source.name).advantage.by_critic for source in self.tasks
        ):
            raise ValueError("actor.segment_tokens needs a critic at the end of a segment: learner.advantage gae")
        if (context := self.model.context) is not None and context < self.actor.context_tokens:
            raise ValueError(
                f"actor.context_tokens: {self.actor.context_tokens} is more than the {context} of the model "
                f"(max_position_embeddings in {self.model.path}/config.json)"
            )
        names = [source.name for source in (*self.tasks, *self.evaluation)]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks and evaluation must all have different names, not {names}")
        return self

    def actor_config(self, paths: RunPaths, name: str) -> ActorConfig:
        """What an engine or an actor of this run is started with."""
        return ActorConfig(
            run_dir=paths.root,
            model=self.model.path or paths.model,
            buffer=self.buffer,
            engine=self.engine,
            actor=self.actor,
            sources=self.tasks,
            evaluation=tuple(TaskSource(**source.model_dump(exclude={"episodes"})) for source in self.evaluation),
            name=name,
        )

    def learner_config(self, paths: RunPaths) -> dict[str, Any]:
        """What the learner of this run is started with, as JSON."""
        model = str(self.model.path or paths.model)
        parts = {"buffer": self.buffer.model_dump(mode="json"), "learner": self.learner.model_dump(mode="json")}
        return {"run_dir": str(paths.root), "model": model, **parts}


def load(recipe: str, overrides: Sequence[str] = (), runs: Path = Path("runs")) -> tuple[Recipe, RunPaths]:
    """Reads a recipe, by path or by the name of one that comes with Argosy, and applies `key.path=value` overrides."""
    path = _find(recipe)
    data = _read(path)
    for override in overrides:
        _apply(data, override)
    if (preset := data.pop("preset", None)) is not None:
        data = _over(_preset(preset, path), data)
    _find_beside(path, data)
    name = data.get("name", path.stem)
    paths = RunPaths((runs / str(name)).resolve())
    for part, key, value in (
        ("buffer", "run", str(name)),
        ("buffer", "url", paths.redis_url),
        ("learner.supervised", "data", str(paths.demonstrations)),
    ):
        _default(data, part, key, value)
    try:
        checked = Recipe.model_validate(data)
        checked.actor_config(paths, "any")  # what must fit together there is checked there
        for source in (*checked.tasks, *checked.evaluation):
            _check_environment(source)
    except ValidationError as error:
        raise RecipeError("\n".join(f"{path}: {problem}" for problem in _explain(error, data))) from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return checked, paths


def describe(recipe: BaseModel, indent: int = 0) -> Iterator[str]:
    """The resolved settings as YAML, each with its meaning as a comment."""
    pad = "  " * indent
    for name, field in type(recipe).model_fields.items():
        value = getattr(recipe, name)
        if field.description:
            yield f"{pad}# {' '.join(field.description.split())}"
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from describe(value, indent + 1)
        else:
            plain = recipe.model_dump(mode="json", include={name})[name]
            items = [f"\n{pad}- {_inline(item)}" for item in plain] if isinstance(plain, list) else []
            yield f"{pad}{name}:" + ("".join(items) or f" {_inline(plain)}")


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).removesuffix("...\n").rstrip()


def _find(recipe: str) -> Path:
    for path in (Path(recipe), RECIPES / f"{recipe}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    raise RecipeError(f"no recipe {recipe!r}: give the path of a YAML file, or one of {known}")


def _preset(name: Any, path: Path) -> dict[str, Any]:
    known = {file.stem: file for file in sorted(PRESETS.glob("*.yaml"))}
    if name not in known:
        raise RecipeError(f"{path}: no preset {name!r}: there are {', '.join(known)}")
    return _read(known[name])


def _over(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """`base`, except for what `data` says; a part that names another function takes nothing from the base's."""
    merged = dict(base)
    for key, value in data.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and value.get("name") in (None, below.get("name")):
            value = _over(below, value)
        merged[key] = value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} must hold `key: value` lines, not a {type(data).__name__}")
    return data


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, instead of the last one winning unseen."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {', '.join(twice)} is given twice")
        return super().construct_mapping(node, deep)


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"{override!r}: write key=value, e.g. learner.stop.steps=50")
    *parents, last = key.split(".")
    place: Any = data
    for parent in parents:
        place = place[_index(place, parent, key)] if isinstance(place, list) else place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise RecipeError(f"{override!r}: {parent} holds a value, not more keys")
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{override!r}: the value is not YAML: {error}") from None
    place[_index(place, last, key) if isinstance(place, list) else last] = value


def _index(place: list[Any], part: str, key: str) -> int:
    if not (part.isdigit() and int(part) < len(place)):
        raise RecipeError(f"{key}: {part!r} must be a number below {len(place)}, the length of that list")
    return int(part)


def _default(data: dict[str, Any], part: str, key: str, value: str) -> None:
    """Fills in what only the run's folder decides, unless the recipe says otherwise."""
    place: Any = data
    for name in part.split("."):
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place.setdefault(key, value)


def _find_beside(path: Path, data: dict[str, Any]) -> None:
    """An environment's file is looked for from the recipe's folder, wherever the command is given."""
    for source in (*(data.get("tasks") or ()), *(data.get("evaluation") or ())):
        env = source.get("env") if isinstance(source, dict) else None
        if isinstance(env, str) and env.startswith(("./", "../")):
            source["env"] = str((path.parent / env).resolve())


def _check_environment(source: TaskSource) -> None:
    try:
        make_env(source.env, **source.kwargs)
    except Exception as error:  # an environment is its author's code: anything may come out of it
        problem = str(error) if isinstance(error, EnvError | TypeError | ValueError) else repr(error)
        raise RecipeError(f"task source {source.name!r}: {problem}") from error


def _explain(error: ValidationError, data: Mapping[str, Any]) -> Iterator[str]:
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            known = [*_fields_at(Recipe, problem["loc"][:-1]), *["preset"] * (len(problem["loc"]) == 1)]
            near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}"
            yield f"unknown key {where!r}: {hint}"
        elif problem["type"] == "missing":
            yield f"{where!r} is missing"
        else:
            given = problem["input"]
            shown = f", not {given!r}" if isinstance(given, str | int | float | bool) else ""
            yield f"{where or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def _fields_at(model: type[BaseModel], location: Sequence[Any]) -> Iterator[str]:
    """The keys that are valid at a place of the recipe."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    yield from model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _model_in(part))), None)
