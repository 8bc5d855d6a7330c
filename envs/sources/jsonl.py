"""Prompts from a JSONL file, one a line, judged by a checker.

Invariant: of a file only the places of its rows are held in memory; a row is read when its turn comes. A row that
cannot be judged is no task: it is listed in `errors` with its line and field, and the rest loads, unless there are more
than `most_malformed` of them.
"""

import asyncio
import functools
import json
import logging
import threading
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from ..tasks.reading import Problem
from ..tasks.validation import Check
from .answers import AnswerEnv, Question
from .checkers import Checker, load_checker
from .order import check_split, in_split, position

log = logging.getLogger(__name__)

_SHOWN = 5  # malformed rows that an error or a warning names
_indexing = threading.Lock()


@dataclass
class Index:
    """Where the good rows of a split begin, and what is wrong with the others."""

    places: "array[int]" = field(default_factory=lambda: array("Q"))
    lines: "array[int]" = field(default_factory=lambda: array("L"))
    errors: list[Problem] = field(default_factory=list)


class Jsonl(AnswerEnv):
    """The environment `argosy/jsonl`.

    `checker` is exact, contains, regex, number, choice, json, code or the import path of a function `(answer, row)`.
    `split` chooses train or held_out (a fifth, by a hash of the prompt) of a file that has both.
    """

    def __init__(
        self, path: str, checker: str = "exact", split: str = "all", system: str = "", most_malformed: int = 100
    ):
        check_split(split)
        self.path, self.split, self.system = Path(path).expanduser().resolve(), split, system
        self.checker = load_checker(checker)
        self.most_malformed = most_malformed

    @property
    def index(self) -> Index:
        if not self.path.is_file():
            raise Problem(self.path, "", "there is no such file")
        state = self.path.stat()
        with _indexing:  # many episodes begin at once; one reads
            return _index(self.path, self.checker, self.split, self.most_malformed, (state.st_mtime_ns, state.st_size))

    @property
    def errors(self) -> list[Problem]:
        return self.index.errors

    @property
    def count(self) -> int:
        return len(self.index.places)

    def __len__(self) -> int:
        return self.count

    async def question(self, seed: int) -> Question:
        index = await asyncio.to_thread(lambda: self.index)
        at = position(seed, len(index.places))
        with self.path.open("rb") as file:
            file.seek(index.places[at])
            row = _row(file.readline(), self.path, index.lines[at], self.checker)
        opening = row["messages"] or [{"role": "user", "content": row["prompt"]}]
        name = f"{self.path.name}:{index.lines[at]}" if row["id"] is None else str(row["id"])
        return Question(name, opening, lambda answer: self.checker.score(answer, row), self.checker.reference(row))

    async def validate(self, limit: int | None = None) -> AsyncIterator[Check]:
        try:
            errors = (await asyncio.to_thread(lambda: self.index)).errors
        except Problem as refused:
            yield Check(refused.where, "malformed", refused.message)
            return
        for error in errors:
            yield Check(error.where, "malformed", f"{error.field}: {error.message}" if error.field else error.message)
        async for check in super().validate(limit):
            yield check


@functools.lru_cache(maxsize=32)
def _index(path: Path, checker: Checker, split: str, most_malformed: int, state: tuple[int, int]) -> Index:
    index = Index()
    with path.open("rb") as file:
        place = 0
        for number, line in enumerate(file, 1):
            begins, place = place, place + len(line)
            if not line.strip():
                continue
            try:
                row = _row(line, path, number, checker)
            except Problem as error:
                index.errors.append(error)
                if len(index.errors) > most_malformed:
                    _refuse(f"more than {most_malformed} malformed rows (most_malformed)", path, index)
                continue
            if in_split(row["prompt"] or json.dumps(row["messages"]), split):
                index.places.append(begins)
                index.lines.append(number)
    if not index.places:
        _refuse(f"no row of split {split!r} that checker {checker.name!r} can judge", path, index)
    if index.errors:
        log.warning("%s: %d malformed rows are left out: %s", path, len(index.errors), _some(index))
    return index


def _row(line: bytes, path: Path, number: int, checker: Checker) -> dict[str, Any]:
    where = f"{path}:{number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Problem(where, "", f"is not JSON: {error}") from None
    try:
        return checker.row.model_validate(value).model_dump()
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise Problem(where, ".".join(map(str, first["loc"])), message[:1].lower() + message[1:]) from None


def _refuse(reason: str, path: Path, index: Index) -> None:
    shown = f": {_some(index)}" if index.errors else ""
    raise Problem(path, "", reason + shown)


def _some(index: Index) -> str:
    more = len(index.errors) - _SHOWN
    return "; ".join(map(str, index.errors[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
