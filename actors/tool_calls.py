"""Hermes tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Invariant: any text whatsoever is answered with either the calls or an error that the model can read; nothing raises.
One malformed call voids the whole message, so that the model never has to guess which of its calls took place.
"""

import json
import re
from typing import Any

from ..envs import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def parse(text: str) -> tuple[str, list[ToolCall], str | None]:
    """The text outside the calls, the calls in order, and what is wrong with them if something is."""
    content = _CALL.sub("", text).strip()
    if OPEN in content or CLOSE in content:
        return content, [], f"{OPEN} without {CLOSE}" if OPEN in content else f"{CLOSE} without {OPEN}"
    calls = []
    for body in _CALL.findall(text):
        call = _parse_call(body)
        if isinstance(call, str):
            return content, [], call
        calls.append(call)
    return content, calls, None


def _parse_call(body: str) -> ToolCall | str:
    try:
        call: Any = json.loads(body)
        if "\\u" in body:
            json.dumps(call, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):  # the latter for "[[[[..."
        return "the tool call is not valid JSON"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'the tool call must be {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return "the tool call's arguments must be a JSON object"
    return ToolCall(call["name"], arguments)
