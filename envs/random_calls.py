"""Calls that fit a tool's JSON schema, and calls that no environment should trip over.

Invariant: what is drawn depends on the random generator, the schemas and the messages alone, so that the same
episode met with the same seed is played the same way.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from .tool_env import Message
from .tools import ToolCall

Turn = tuple[Sequence[ToolCall] | None, str, str | None]
"""Its calls, its text, and what kept the text from being read as calls: the arguments of `ToolEnv.act`."""

_WORDS = ("", "a", "0", "-1", "main.py", "../x", "äöü 漢字 🚢", "a b\nc", "null", "[]", "x" * 300)
_WIDE = (-(2**63), -1, 0, 1, 2, 3, 10, 2**31, 10**30)
_ODD: tuple[Any, ...] = (None, [], {"a": {}}, math.nan, 10**400, "x" * 20_000)
_DEPTH = 4  # of nested schemas; below it the simplest value will do


def valid_call(schemas: Sequence[Mapping[str, Any]], messages: Sequence[Message], rng: random.Random) -> ToolCall:
    """A call of one of the tools. Half of its texts are words that the environment has said, such as names of files."""
    function = rng.choice(list(schemas))["function"]
    heard = [word.strip(".,:;()'\"") for message in messages for word in str(message["content"])[:2000].split()]
    return ToolCall(function["name"], _value(function["parameters"], function["parameters"], rng, heard))


def odd_turns(schemas: Sequence[Mapping[str, Any]], rng: random.Random) -> list[Turn]:
    """What a model without training does, in any order."""
    turns: list[Turn] = [
        ([], "", None),
        ([], "I am thinking. \x00 \ud7ff 🚢" + "x" * 10_000, None),
        (None, "", "the tool call is not valid JSON"),
        ([ToolCall("no_such_tool", {})], "", None),
    ]
    for function in (schema["function"] for schema in schemas):
        known = function["parameters"].get("properties", {})
        odd = [ToolCall(function["name"], dict.fromkeys(known, value)) for value in _ODD] if known else []
        turns.append(([ToolCall(function["name"], {"no_such_argument": 1}), *odd], "", None))
    rng.shuffle(turns)
    return turns


def _value(schema: Any, root: Mapping[str, Any], rng: random.Random, heard: Sequence[str], depth: int = 0) -> Any:
    if not isinstance(schema, Mapping):  # `true`: anything
        return rng.choice(_WORDS)
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return _value(found, root, rng, heard, depth + 1)
    for key in ("enum", "anyOf", "oneOf"):
        if key in schema:
            chosen = rng.choice(list(schema[key]))
            return chosen if key == "enum" else _value(chosen, root, rng, heard, depth)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match rng.choice(kind) if isinstance(kind, list) else kind:
        case "string":
            return _text(schema, rng, heard)
        case "integer":
            return _number(schema, rng)
        case "number":
            return float(_number(schema, rng)) + rng.choice((0.0, 0.5))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            least = schema.get("minItems", 0)
            size = least if depth >= _DEPTH else rng.randint(least, min(schema.get("maxItems", 3), least + 3))
            return [_value(schema.get("items", {}), root, rng, heard, depth + 1) for _ in range(size)]
        case "object":
            required = schema.get("required", ())
            named = schema.get("properties", {}).items()
            taken = [(key, part) for key, part in named if key in required or (depth < _DEPTH and rng.random() < 0.5)]
            return {key: _value(part, root, rng, heard, depth + 1) for key, part in taken}
    return None


def _text(schema: Mapping[str, Any], rng: random.Random, heard: Sequence[str]) -> str:
    text = rng.choice(heard) if heard and rng.random() < 0.5 else rng.choice(_WORDS)
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _number(schema: Mapping[str, Any], rng: random.Random) -> int:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    low, high = low + ("exclusiveMinimum" in schema), high - ("exclusiveMaximum" in schema)
    if math.isfinite(low) and math.isfinite(high):
        return rng.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
    usual = rng.randint(0, 10) if rng.random() < 0.85 else rng.choice(_WIDE)
    return int(min(max(usual, low), high))
