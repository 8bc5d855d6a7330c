"""A reward as a verifier left it: one finite number in range, or no reward at all.

Invariant: what is not readable to the letter is `InvalidGrade`, never 0 and never a guess: "1 # ok", "nan", "1e999",
true, an empty file and two numbers are all refused.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidGrade

REWARDS = ("reward.json", "reward.txt")
_LARGEST = 1 << 16  # bytes of a reward file
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def read_reward(files: Mapping[str, bytes], least: float = 0.0, most: float = 1.0) -> dict[str, float]:
    """The numbers of reward.json, else of reward.txt: always with "reward", which is their mean if none is named so."""
    for name, content in files.items():
        if len(content) > _LARGEST:
            raise InvalidGrade(f"{name} is larger than {_LARGEST} bytes")
    if "reward.json" in files:
        numbers = _flat(files["reward.json"])
    elif "reward.txt" in files:
        text = files["reward.txt"].decode(errors="replace").strip()
        if not _NUMBER.fullmatch(text):
            raise InvalidGrade(f"reward.txt must hold exactly one number, not {text[:80]!r}")
        numbers = {"reward": float(text)}
    else:
        raise InvalidGrade("the verifier left neither reward.json nor reward.txt")
    reward = numbers.setdefault("reward", math.fsum(numbers.values()) / len(numbers))
    if not (math.isfinite(reward) and least <= reward <= most):
        raise InvalidGrade(f"the reward must be from {least:g} to {most:g}, not {reward!r}")
    return numbers


def _flat(content: bytes) -> dict[str, float]:
    try:
        found = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidGrade(f"reward.json cannot be read: {error}") from None
    if not isinstance(found, dict) or not found:
        raise InvalidGrade('reward.json must be an object of numbers, such as {"reward": 1.0}')
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidGrade(f"reward.json: {name!r} must be one finite number, not {str(value)[:80]}")
    return {name: float(value) for name, value in found.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a name occurs twice")
    return dict(pairs)
