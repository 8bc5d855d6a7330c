"""Questions that are answered in one turn, with text.

Invariant: the model's first turn ends the episode, whatever is in it, and only its final answer is judged: what stands
behind its reasoning. A scorer that fails is nobody's merit (`InvalidGrade`), never a reward of 0.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InfrastructureError, InvalidGrade
from ..tasks.validation import Check
from ..tool_env import Grade, Message, ToolEnv

_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LOOKED_AT = 100  # tasks that a validation without a limit takes of an endless source
_SCORE_SECONDS = 120.0
_TELLING = 20  # characters: a shorter reference stands in many a prompt by chance


@dataclass(frozen=True)
class Question:
    id: str
    messages: list[Message]
    """What is said after the environment's `system` and before the answer."""
    score: Callable[[str], Awaitable[float]]
    """The reward of an answer."""
    reference: str | None = None
    """An answer that must earn 1."""


class AnswerEnv(ToolEnv):
    """Subclass it: `question(seed)`."""

    max_turns = 1

    async def question(self, seed: int) -> Question:
        """The same for the same seed."""
        raise NotImplementedError(f"{type(self).__name__} must define question(seed)")

    @property
    def count(self) -> int | None:
        """How many different questions there are, if anybody knows."""
        return None

    async def setup(self, seed: int, options: dict[str, Any]) -> list[Message]:
        self._question, self._said = await self.question(seed), ""
        return self._question.messages

    def reply(self, content: str) -> str:
        self._said = content
        self.finish()
        return ""

    async def grade(self) -> Grade:
        return Grade(await _scored(self._question, final_answer(self._said)))

    async def validate(self, limit: int | None = None) -> AsyncIterator[Check]:
        """The reference must earn 1 and say so twice, no answer must earn nothing, no prompt may hold the answer."""
        count = self.count or _LOOKED_AT
        for seed in range(count if limit is None else min(limit, count)):
            question = await self.question(seed)
            try:
                found = [Check(question.id, *problem) async for problem in _problems(question)]
            except InfrastructureError as error:
                found = [Check(question.id, "grading fails", str(error))]
            for check in found or [Check(question.id)]:
                yield check


def final_answer(text: str) -> str:
    """What follows the reasoning: the last <answer>...</answer> if there is one, else all behind </think>."""
    text = text.rpartition("</think>")[2]
    marked = _MARKED.findall(text)
    return (marked[-1] if marked else text).strip()


async def _problems(question: Question) -> AsyncIterator[tuple[str, str]]:
    if (empty := await _scored(question, "")) > 0:
        yield "empty passes", f"no answer earns {empty:g}"
    if question.reference is None:
        return
    first, again = [await _scored(question, final_answer(question.reference)) for _ in range(2)]
    if first != again:
        yield "flaky", f"the reference earned {first:g}, then {again:g}"
    elif first < 1:
        yield "reference fails", f"{question.reference:.60} earns {first:g}"
    shown = "\n".join(message["content"] for message in question.messages)
    if len(question.reference) >= _TELLING and question.reference in shown:
        yield "leaks its answer", "the reference stands in the prompt"


async def _scored(question: Question, answer: str) -> float:
    try:
        async with asyncio.timeout(_SCORE_SECONDS) as limit:
            reward = await question.score(answer)
    except InfrastructureError:
        raise
    except Exception as error:
        what = f"no reward within {_SCORE_SECONDS:g} s" if limit.expired() else f"{type(error).__name__}: {error}"
        raise InvalidGrade(f"{question.id}: the checker failed on {answer!r:.100}: {what}") from error
    return Grade(reward).reward
