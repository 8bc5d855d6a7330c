"""The procedural puzzles of reasoning-gym, each judged by its own scorer.

Invariant: a puzzle depends on dataset, config, split and seed alone. The splits share no question: a hash of its text
says which one it belongs to.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping
from typing import Any

from .answers import AnswerEnv, Question
from .order import check_split, in_split, position

log = logging.getLogger(__name__)

_LOOKED_AT = 200  # puzzles in a row, for one of the split: a fifth belongs to the smaller one


class ReasoningGym(AnswerEnv):
    """The environment `argosy/reasoning-gym`.

    `dataset` is one of reasoning-gym's names ("chain_sum"), `config` what that takes besides size and seed.
    """

    system = (
        "Answer the question. You may reason first; then give the answer, and only the answer, "
        "as <answer>answer</answer>."
    )

    def __init__(self, dataset: str, config: Mapping[str, Any] | None = None, split: str = "all", size: int = 10_000):
        check_split(split)
        self.dataset, self.split, self.size = dataset, split, size
        self.config = tuple(sorted((config or {}).items()))

    @property
    def count(self) -> int:
        return self.size

    def __len__(self) -> int:
        return self.size

    async def question(self, seed: int) -> Question:
        # Some make a puzzle in seconds, and importing all of them takes seconds too.
        at, entry = await asyncio.to_thread(self._entry, seed)
        opening = [{"role": "user", "content": entry["question"]}]
        reference = entry["answer"] if isinstance(entry["answer"], str) else None

        async def score(answer: str) -> float:
            return await asyncio.to_thread(self._score, answer, entry)

        return Question(f"{self.dataset}/{at}", opening, score, reference)

    def _entry(self, seed: int) -> tuple[int, dict[str, Any]]:
        puzzles = _puzzles(self.dataset, self.config, self.size)
        first = position(seed, self.size)
        for at in range(first, first + _LOOKED_AT):
            entry = puzzles[at % self.size]
            if in_split(entry["question"], self.split):
                return at % self.size, entry
        raise ValueError(
            f"reasoning-gym's {self.dataset} has no puzzle for split {self.split!r} among {_LOOKED_AT}: it has too few "
            "different ones; choose another config or split='all'"
        )

    def _score(self, answer: str, entry: dict[str, Any]) -> float:
        """Its scorers give a little to a wrong answer that is one, but none gets that for nothing."""
        if not answer:
            return 0.0
        try:
            return float(_puzzles(self.dataset, self.config, self.size).score_answer(answer, entry))
        except Exception as error:  # written for answers of the right form; others must not escape their grade
            log.warning("%s cannot score %.100r (%r): it earns 0", self.dataset, answer, error)
            return 0.0


@functools.lru_cache(maxsize=32)
def _puzzles(dataset: str, config: tuple[tuple[str, Any], ...], size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError('reasoning-gym is missing: pip install "argosy[reasoning-gym]"') from error
    if dataset not in DATASETS:
        raise ValueError(f"reasoning-gym has no dataset {dataset!r}; it has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=0, **dict(config))
    except (AssertionError, TypeError) as error:
        raise ValueError(f"reasoning-gym's {dataset} does not take {dict(config)}: {error}") from error
