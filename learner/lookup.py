"""The function a recipe names: one of Argosy's own, or any other by import path.

What a function takes is what its caller gives it and what a recipe may set: positional arguments are asked for by name,
keyword-only ones are settings. So a function of a user's own needs no registration, and a recipe that it does not fit
is refused before anything starts.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Signature(NamedTuple):
    asks: frozenset[str]
    """What it is called with, by name."""
    settings: frozenset[str]
    """What a recipe may set."""


def find(kind: str, name: str, own: Mapping[str, Any]) -> Any:
    """The function called `name`. Raises ValueError, which names the nearest there is."""
    if name in own:
        return own[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"no {kind} {name!r}: {hint}there are {', '.join(own)}, and your own as package.module:function"
        )
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{kind} {name!r}: cannot import {module!r}: {error}") from error
    except AttributeError:
        raise ValueError(f"{kind} {name!r}: {module} has no {attribute!r}") from None


def signature(function: Callable[..., Any]) -> Signature:
    """What `function` asks for, and what it lets a recipe set."""
    parameters = inspect.signature(function).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    settings = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return Signature(frozenset(p.name for p in named), frozenset(p.name for p in settings))


def check(kind: str, name: str, function: Callable[..., Any], given: Collection[str], chosen: Collection[str]) -> None:
    """Raises ValueError if `function` asks for what is not `given`, or a recipe has `chosen` what it does not take."""
    takes = signature(function)
    if unknown := sorted(takes.asks.difference(given)):
        raise ValueError(f"{kind} {name!r} asks for {', '.join(unknown)}: it can have {', '.join(given)}")
    if unknown := sorted(set(chosen).difference(takes.settings)):
        known = ", ".join(sorted(takes.settings)) or "none"
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(unknown)}; it has {known}")
