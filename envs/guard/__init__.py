"""Blocks the single tool call that cheats, and says so."""

from .guard import Blocked, Guard, Rule, Terms, load_rules
from .judge import Judge

__all__ = ["Blocked", "Guard", "Judge", "Rule", "Terms", "load_rules"]
