"""A learner whose batches are old: `python benchmarks/late_learner.py CONFIG.json`, otherwise `argosy.learner`.

Invariant: a batch is claimed only while buffer.eta batches are complete. New work then stands behind them in the queue,
and what is claimed, oldest first, is about eta versions old, however much faster the learner is than its actors. The
buffer drops what is older, so the staleness that occurs is eta at most; at eta 0 nothing changes.
"""

import runpy
from unittest.mock import patch

from argosy.buffer import ReplayBuffer
from argosy.learner import run

LOOK_SECONDS = 0.1  # the buffer rings when one batch is complete; nobody rings for the ones behind it


class Aged(ReplayBuffer):
    """A buffer that holds back its newest eta batches."""

    def claim(self, step: int) -> list[str] | None:
        reserve = self._settings.eta * self._settings.batch_size
        return super().claim(step) if len(self.candidates()) >= reserve else None

    def wait(self, timeout: float) -> None:
        super().wait(min(timeout, LOOK_SECONDS))


if __name__ == "__main__":
    with patch.object(run, "ReplayBuffer", Aged):
        runpy.run_module("argosy.learner", run_name="__main__")
