"""Which versions hold the same weights, and how old that makes what was sampled.

A learner that starts again publishes its checkpoint's weights under a new version, because an id is never used twice.
Counted in ids, everything that waits in the buffer would have aged by the versions that were lost.

Invariant: an age is the number of versions between two policies of one lineage: what was sampled by the checkpoint's
version or before is as old as it was when the checkpoint was made. What a lost version sampled counts as the
checkpoint's. `attempts.lua` keeps the same bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lineage:
    """Lineage(((9, 4),)): version 9 holds the weights of 4, and 5 to 8 are lost. The newest comes first."""

    repeats: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, repeats: Iterable[Sequence[int]]) -> "Lineage":
        """From JSON's lists."""
        return cls(tuple((version, older) for version, older in repeats))

    def repeat(self, version: int, older: int) -> "Lineage":
        """`version` was published with the weights of `older`, which the checkpoint held."""
        before = self.repeats
        if before and before[0][0] == older:  # which repeats another itself: nothing was trained in between
            older, before = before[0][1], before[1:]
        return Lineage(((version, older), *before))

    def age(self, sampled: int, now: int) -> int:
        """How many versions the policy `now` is ahead of the one that sampled."""
        age = 0
        for version, older in self.repeats:
            if sampled < version <= now:
                age, now = age + now - version, older
        return age + max(0, now - sampled)

    def within(self, eta: int, now: int) -> "Lineage":
        """Without what lies more than `eta` versions back."""
        kept = [(version, older) for version, older in self.repeats if self.age(version, now) <= eta]
        return Lineage(tuple(kept))
