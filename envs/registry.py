"""Environments by name: Gymnasium's registry is the only one; an import path or a file works without registering.

Packages register theirs with a function that they name in the entry-point group `gymnasium.envs`. Gymnasium itself
stopped calling those with 1.0, so they are called here, once, when a name is not known without them.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, namespace

from .errors import UnknownEnvironment
from .tool_env import ToolEnv

GROUP = "gymnasium.envs"


def register(id: str, entry_point: str | type[ToolEnv], **kwargs: Any) -> None:
    """Name an environment, e.g. `register("me/maze", "me.maze:Maze", size=4)`; `kwargs` are its defaults."""
    gymnasium.register(id=id, entry_point=cast(Any, entry_point), kwargs=kwargs)


def make_env(id: str, **kwargs: Any) -> ToolEnv:
    """A new environment from a registered id ("argosy/repair"), an import path ("package.module:Class") or a file
    ("./maze.py:Maze"; the class may be left out when the file has only one)."""
    if id not in gymnasium.registry and not _is_path(id):
        load_plugins()
    if id in gymnasium.registry:
        spec = gymnasium.registry[id]
        entry, kwargs = spec.entry_point, {**spec.kwargs, **kwargs}
    elif _is_path(id):
        entry = id
    else:
        near = difflib.get_close_matches(id, environments(), n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else "write a registered id, 'package.module:Class' or 'file.py:Class'"
        )
        raise UnknownEnvironment(f"no environment {id!r}: {hint}")
    factory = _load(entry) if isinstance(entry, str) else entry
    env = factory(**kwargs) if factory is not None else None
    if isinstance(env, gymnasium.Env) and not isinstance(env, ToolEnv):
        env.close()
        raise UnknownEnvironment(
            f"{id!r} is a {type(env).__name__}, not a ToolEnv: give it tools with argosy.envs.TextGame"
        )
    if not isinstance(env, ToolEnv):
        raise UnknownEnvironment(f"{id!r} is a {type(env).__name__}, not a ToolEnv")
    return env


def environments() -> list[str]:
    """Registered names that could be a ToolEnv: Gymnasium's own are not."""
    load_plugins()
    return [name for name, spec in gymnasium.registry.items() if not where(spec).startswith("gymnasium.")]


def where(spec: EnvSpec) -> str:
    """The import path of what makes it."""
    entry = spec.entry_point
    return entry if isinstance(entry, str) else f"{entry.__module__}:{getattr(entry, '__name__', entry)}"


@functools.cache
def load_plugins() -> None:
    """Let installed packages register their environments; one that cannot is named in a warning, the rest goes on."""
    for plugin in entry_points(group=GROUP):
        try:
            function = plugin.load()
            if plugin.name.startswith("__"):  # "__root__": its ids are whole
                function()
            else:
                with namespace(plugin.name):
                    function()
        except Exception as error:
            owner = plugin.dist.name if plugin.dist else "a package"
            where = f"entry point {plugin.name} = {plugin.value}"
            warnings.warn(f"{owner} cannot register its environments ({where}): {error!r}", stacklevel=2)


def _is_path(id: str) -> bool:
    return ":" in id or id.endswith(".py")


def _load(path: str) -> Any:
    module, _, name = path.rpartition(":") if not path.endswith(".py") else (path, "", "")
    loaded = _load_file(Path(module)) if module.endswith(".py") else _load_module(module, path)
    if name:
        if not hasattr(loaded, name):
            raise UnknownEnvironment(f"{module!r} has no {name!r}{_instead(loaded)}")
        return getattr(loaded, name)
    found = _defined_in(loaded)
    if len(found) != 1:
        raise UnknownEnvironment(f"{module!r} must define one ToolEnv or be given with one{_instead(loaded)}")
    return found[0]


def _load_module(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise UnknownEnvironment(f"cannot import {module!r} for environment {path!r}: {error}") from error
        raise


def _load_file(file: Path) -> ModuleType:
    """As Python runs a script: what stands beside the file can be imported. Each file is executed once a process."""
    file = file.resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise UnknownEnvironment(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _defined_in(module: ModuleType) -> list[type[ToolEnv]]:
    return [
        member
        for member in vars(module).values()
        if isinstance(member, type) and issubclass(member, ToolEnv) and member.__module__ == module.__name__
    ]


def _instead(module: ModuleType) -> str:
    names = [member.__name__ for member in _defined_in(module)]
    return f"; its environments are {', '.join(names)}" if names else "; it defines no ToolEnv"
