"""Grading that cannot be gamed: a clean room, strict reading, a witness."""

from .verifier import apply_solution, begin, grade, place, prepare, steady

__all__ = ["apply_solution", "begin", "grade", "place", "prepare", "steady"]
