"""The learner: models, objectives, training and publishing on Megatron-core.

Importing this package makes Megatron importable on a machine without CUDA (megatron_cpu). The names below are its
public face; each is imported when first used, so that reading settings costs neither torch nor Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .megatron_cpu import install

if TYPE_CHECKING:
    from .advantages import gae
    from .model import Critic, Policy
    from .objectives import dis, ppo
    from .run import LearnerConfig
    from .settings import LearnerSettings
    from .trainer import Trainer

__all__ = ["Critic", "LearnerConfig", "LearnerSettings", "Policy", "Trainer", "dis", "gae", "ppo"]

_HOMES = {
    "Critic": "model",
    "LearnerConfig": "run",
    "LearnerSettings": "settings",
    "Policy": "model",
    "Trainer": "trainer",
    "dis": "objectives",
    "gae": "advantages",
    "ppo": "objectives",
}

install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
