"""A model from nothing: a tokenizer made for what the environments say, random weights, and an expert's episodes.

Invariant: the model folder and the archive appear whole or not at all (each is renamed into place when it is complete),
so a stage that was interrupted is simply done again. The tokenizer is trained on the very text it will see: the
experts' episodes, first played with a tokenizer that knows only bytes.
"""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from tokenizers import Tokenizer

from ..buffer import read_archive
from .paths import RunPaths, write_whole
from .processes import Process, python
from .recipe import Recipe, ScratchModel

CORPUS_EPISODES = 300  # enough to have seen every phrase of a narrow task family
BYTES = 263  # the smallest tokenizer: every byte and the special tokens

Run = Callable[[Process], Awaitable[None]]


async def make_model(recipe: Recipe, paths: RunPaths, run: Run) -> None:
    """Makes the model of `model.scratch`, unless it is there."""
    scratch = recipe.model.scratch
    if scratch is None or paths.model.exists():
        return
    draft = paths.root / "model.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    corpus, episodes = draft / "corpus.jsonl", draft / "corpus.archive"
    corpus.touch()
    await run(_scratch(scratch.model_copy(update={"vocabulary": BYTES}), corpus, draft / "bytes", recipe, paths))
    await run(_demonstrate(recipe, paths, draft / "bytes", CORPUS_EPISODES, episodes))
    tokenizer = Tokenizer.from_file(str(draft / "bytes" / "tokenizer.json"))
    with corpus.open("w") as file:
        for archived in read_archive(episodes):
            for trace in archived.trajectory.traces:
                file.write(json.dumps(tokenizer.decode(trace.tokens.tolist(), skip_special_tokens=False)) + "\n")
    await run(_scratch(scratch, corpus, draft / "model", recipe, paths))
    (draft / "model").rename(paths.model)
    shutil.rmtree(draft)


async def demonstrate(recipe: Recipe, paths: RunPaths, run: Run) -> None:
    """Makes the archive of the experts' episodes, unless it is there."""
    if recipe.demonstrations == 0 or paths.demonstrations.exists():
        return
    model = recipe.model.path or paths.model
    await run(_demonstrate(recipe, paths, model, recipe.demonstrations, paths.demonstrations))


def _scratch(scratch: ScratchModel, corpus: Path, out: Path, recipe: Recipe, paths: RunPaths) -> Process:
    sizes = {
        "vocab": scratch.vocabulary,
        "hidden": scratch.hidden,
        "layers": scratch.layers,
        "heads": scratch.heads,
        "kv-heads": max(1, scratch.heads // 2),
        "context": recipe.actor.context_tokens,
    }
    arguments = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    command = ("argosy.learner.scratch", "--corpus", str(corpus), "--out", str(out), *arguments)
    return python("model", *command, log=paths.logs / "model.log", may_end=True)


def _demonstrate(recipe: Recipe, paths: RunPaths, model: Path, episodes: int, out: Path) -> Process:
    config = recipe.actor_config(paths, "expert").model_copy(update={"model": model})
    file = out.with_name(out.name + ".config.json")
    write_whole(file, config.model_dump_json())
    command = ("argosy.actors", "demonstrate", str(file), "--episodes", str(episodes), "--out", str(out))
    return python("demonstrations", *command, log=paths.logs / "demonstrations.log", may_end=True)
