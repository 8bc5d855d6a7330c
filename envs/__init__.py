"""Worlds, tools, sandboxes, tasks and grading. Knows neither Redis nor torch.

Write an environment: `ToolEnv`, `tool`, `Grade`, `register`. Run code of others: `SandboxPool`, `Sandbox`.
"""

from .errors import (
    EnvError,
    InfrastructureError,
    InvalidGrade,
    ReplayDiffers,
    SandboxGone,
    SandboxUnavailable,
    ToolError,
    UnknownEnvironment,
    UnusablePackage,
)
from .mcp import McpEnv
from .registry import make_env, register
from .sandboxes import Limits, Outcome, Result, Sandbox, SandboxPool, SandboxSpec, close_shared_pools
from .text_game import TextGame
from .tool_env import Grade, Message, Step, ToolEnv
from .tools import Tool, ToolCall, tool

__all__ = [
    "EnvError",
    "Grade",
    "InfrastructureError",
    "InvalidGrade",
    "Limits",
    "McpEnv",
    "Message",
    "Outcome",
    "ReplayDiffers",
    "Result",
    "Sandbox",
    "SandboxGone",
    "SandboxPool",
    "SandboxSpec",
    "SandboxUnavailable",
    "Step",
    "TextGame",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "UnknownEnvironment",
    "UnusablePackage",
    "close_shared_pools",
    "make_env",
    "register",
    "tool",
]

register("argosy/repair", "argosy.envs.repair:repair")
register("argosy/code", "argosy.envs.code:CodeEnv")
register("argosy/jsonl", "argosy.envs.sources.jsonl:Jsonl")
register("argosy/reasoning-gym", "argosy.envs.sources.reasoning_gym:ReasoningGym")
register("argosy/openenv", "argosy.envs.sources.openenv:OpenEnv")
register("argosy/verifiers", "argosy.envs.sources.verifiers:Verifiers")
