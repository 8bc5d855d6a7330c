"""Environments by name: Gymnasium's registry is the only one; an import path works without registering.

Packages of users register theirs through the entry-point group `gymnasium.envs`, which Gymnasium loads itself.
"""

import difflib
import importlib
from typing import Any, cast

import gymnasium

from .errors import UnknownEnvironment
from .tool_env import ToolEnv


def register(id: str, entry_point: str | type[ToolEnv], **kwargs: Any) -> None:
    """Name an environment, e.g. `register("me/maze", "me.maze:Maze", size=4)`; `kwargs` are its defaults."""
    gymnasium.register(id=id, entry_point=cast(Any, entry_point), kwargs=kwargs)


def make_env(id: str, **kwargs: Any) -> ToolEnv:
    """A new environment from a registered id ("argosy/repair") or an import path ("package.module:Class")."""
    if id in gymnasium.registry:
        spec = gymnasium.registry[id]
        entry, kwargs = spec.entry_point, {**spec.kwargs, **kwargs}
    elif ":" in id:
        entry = id
    else:
        near = difflib.get_close_matches(id, _names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write a registered id or 'package.module:Class'"
        raise UnknownEnvironment(f"no environment {id!r}: {hint}")
    factory = _load(entry) if isinstance(entry, str) else entry
    env = factory(**kwargs) if factory is not None else None
    if not isinstance(env, ToolEnv):
        raise UnknownEnvironment(f"{id!r} is a {type(env).__name__}, not a ToolEnv")
    return env


def _names() -> list[str]:
    """Registered environments that could be a ToolEnv: Gymnasium's own are not."""
    return [name for name, spec in gymnasium.registry.items() if not str(spec.entry_point).startswith("gymnasium.")]


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise UnknownEnvironment(f"cannot import {module!r} for environment {path!r}: {error}") from error
        raise
    except AttributeError as error:
        raise UnknownEnvironment(f"module {module!r} has no {name!r}") from error
