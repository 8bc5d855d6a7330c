"""Where code of others runs and can harm nothing but itself."""

from .pool import SandboxPool, close_shared_pools
from .sandbox import Sandbox
from .spec import DEFAULT_LIMITS, DEFAULT_SPEC, Limits, Outcome, Result, SandboxSpec

__all__ = [
    "DEFAULT_LIMITS",
    "DEFAULT_SPEC",
    "Limits",
    "Outcome",
    "Result",
    "Sandbox",
    "SandboxPool",
    "SandboxSpec",
    "close_shared_pools",
]
