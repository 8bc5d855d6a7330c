"""Which task a seed stands for.

Invariant: it depends on the seed and the number of tasks alone, so every process agrees; n seeds in a row, wherever
they begin, meet each of n tasks once, and neighbours in a file are far apart.
"""

import hashlib
import math

SPLITS = ("all", "train", "held_out")


def position(seed: int, count: int) -> int:
    """The task of a seed, counting from 0: steps of about the golden section, which never meet the same one early."""
    step = round(count * 0.618034)
    while math.gcd(step, count) != 1:
        step += 1
    return seed * step % count


def in_split(key: str, split: str) -> bool:
    """A fifth of all keys, chosen by a hash, is held out."""
    held_out = hashlib.sha256(key.encode()).digest()[0] % 5 == 0
    return split == "all" or held_out == (split == "held_out")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
