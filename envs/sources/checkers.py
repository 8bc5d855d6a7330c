"""Judges of an answer that come with Argosy, and those of users.

Invariant: a checker is a function `(answer, row) -> reward`, and a model of the rows it can judge. A row that fits the
model can be judged; what does not fit is found out when the file is read, not in the middle of a run.
"""

import asyncio
import importlib
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, model_validator

from ..sandboxes import SandboxPool

_NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|-?\.\d+")
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z'])")
_CODE = re.compile(r"```(?:\w*)\n(.*?)```", re.DOTALL)
_CASE_SECONDS = 5.0


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Row(BaseModel):
    """One line of a JSONL file; more fields are for the user's checker."""

    model_config = ConfigDict(extra="allow")

    id: str | int | None = None
    prompt: StrictStr | None = Field(None, min_length=1)
    messages: list[Turn] | None = Field(None, min_length=1)
    answer: Any = None

    @model_validator(mode="after")
    def _one_opening(self) -> "Row":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either a prompt or messages")
        if self.messages is not None and self.messages[-1].role != "user":
            raise ValueError("the last of the messages must be the user's")
        return self


def _number(value: Any) -> float:
    if isinstance(value, str) and (found := numbers_in(value)):
        value = found[-1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a number, or text that ends in one")
    return float(value)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return value


class TextRow(Row):
    answer: StrictStr | Annotated[list[StrictStr], Field(min_length=1)]
    """A list holds alternatives."""


class NumberRow(Row):
    answer: Annotated[float, BeforeValidator(_number)]
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Relative, or absolute where the answer is 0."""


class ChoiceRow(Row):
    answer: Annotated[StrictStr, Field(pattern="^[A-Z]$")]


class PatternRow(Row):
    answer: Annotated[StrictStr, AfterValidator(_pattern)]


class JsonRow(Row):
    answer: Any


class Case(BaseModel):
    model_config = ConfigDict(extra="forbid")

    arguments: list[Any]
    result: Any


class CodeRow(Row):
    function: str
    cases: Annotated[list[Case], Field(min_length=1)]


def exact(answer: str, row: Mapping[str, Any]) -> float:
    return float(answer in [text.strip() for text in _alternatives(row)])


def contains(answer: str, row: Mapping[str, Any]) -> float:
    return float(any(text in answer for text in _alternatives(row)))


def regex(answer: str, row: Mapping[str, Any]) -> float:
    return float(re.search(row["answer"], answer) is not None)


def number(answer: str, row: Mapping[str, Any]) -> float:
    """The last number counts."""
    found, allowed = numbers_in(answer), row["tolerance"] * (abs(row["answer"]) or 1.0)
    return float(bool(found) and abs(found[-1] - row["answer"]) <= allowed)


def choice(answer: str, row: Mapping[str, Any]) -> float:
    """The last capital letter that stands alone counts, in parentheses or not."""
    letters = _LETTER.findall(answer)
    return float(bool(letters) and letters[-1] == row["answer"])


def json_equal(answer: str, row: Mapping[str, Any]) -> float:
    """The answer is JSON, alone or as the last fenced block."""
    blocks = _CODE.findall(answer)
    try:
        value = json.loads(blocks[-1] if blocks else answer)
    except (ValueError, RecursionError):
        return 0.0
    return float(same(value, row["answer"]))


async def code(answer: str, row: Mapping[str, Any]) -> float:
    """The last fenced block, or all of the answer, defines the function; it must be right in every case.

    Expected results stay outside the sandbox.
    """
    blocks = _CODE.findall(answer)
    source, cases = blocks[-1] if blocks else answer, row["cases"]
    arguments = [case["arguments"] for case in cases]
    outcomes = await SandboxPool.shared().run_python(source, row["function"], arguments, timeout=_CASE_SECONDS)
    return float(
        all(o.error is None and same(o.value, case["result"]) for o, case in zip(outcomes, cases, strict=True))
    )


@dataclass(frozen=True)
class Checker:
    name: str
    judge: Callable[[str, Mapping[str, Any]], float | Awaitable[float]]
    row: type[Row] = Row
    reference: Callable[[Mapping[str, Any]], str | None] = lambda row: None
    """An answer that must be right, if the row tells one."""

    async def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """A user's function that does not wait runs in a thread: it must not hold up other episodes."""
        if inspect.iscoroutinefunction(self.judge) or self in BUILT_IN.values():
            reward = self.judge(answer, row)
        else:
            reward = await asyncio.to_thread(self.judge, answer, dict(row))
        return await reward if inspect.isawaitable(reward) else reward


def _alternatives(row: Mapping[str, Any]) -> list[str]:
    return row["answer"] if isinstance(row["answer"], list) else [row["answer"]]


def _written(row: Mapping[str, Any]) -> str | None:
    return row["answer"] if isinstance(row.get("answer"), str) else None


BUILT_IN = {
    checker.name: checker
    for checker in (
        Checker("exact", exact, TextRow, lambda row: _alternatives(row)[0]),
        Checker("contains", contains, TextRow, lambda row: _alternatives(row)[0]),
        Checker("regex", regex, PatternRow),
        Checker("number", number, NumberRow, lambda row: repr(row["answer"])),
        Checker("choice", choice, ChoiceRow, _written),
        Checker("json", json_equal, JsonRow, lambda row: json.dumps(row["answer"])),
        Checker("code", code, CodeRow, _written),
    )
}


def load_checker(name: str) -> Checker:
    """A built-in one by name, or a user's function by import path; ValueError says what is wrong with it."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"no checker {name!r}: write {', '.join(BUILT_IN)} or 'module:function'")
    try:
        function = getattr(importlib.import_module(module), attribute)
        inspect.signature(function).bind("answer", {})
    except ImportError as error:
        raise ValueError(f"checker {name!r} cannot be imported: {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"checker {name!r} must be a function of (answer, row): {error}") from error
    return Checker(name, function, Row, _written)


def numbers_in(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def same(a: Any, b: Any) -> bool:
    """Equality as JSON has it: true is not 1, but 1.0 is."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
