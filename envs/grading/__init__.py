"""Grading that cannot be gamed: a clean room, strict reading, a witness."""

from .history import STRIP, strip_history
from .verifier import apply_solution, begin, grade, place, prepare, steady

__all__ = ["STRIP", "apply_solution", "begin", "grade", "place", "prepare", "steady", "strip_history"]
