"""The episode loop and everything around it: engines, transcripts, workers. Uses `envs` and `buffer`.

Its names load when they are asked for, because SGLang's processes and commands that only read settings import it too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, Generation
    from .episode import Outcome, run_episode
    from .settings import ActorConfig, ActorSettings, EngineSettings, Mixture, TaskSource
    from .transcript import Transcript
    from .worker import Worker

_HOMES = {
    "engine": ("Engine", "Generation"),
    "episode": ("Outcome", "run_episode"),
    "settings": ("ActorConfig", "ActorSettings", "EngineSettings", "Mixture", "TaskSource"),
    "transcript": ("Transcript",),
    "worker": ("Worker",),
}

__all__ = [
    "ActorConfig",
    "ActorSettings",
    "Engine",
    "EngineSettings",
    "Generation",
    "Mixture",
    "Outcome",
    "TaskSource",
    "Transcript",
    "Worker",
    "run_episode",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
