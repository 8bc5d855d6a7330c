"""Tools: a typed method is all a user writes; its schema and its checks come from the signature.

Invariant: whatever a model sends, a tool is entered only with arguments of the declared types. Everything else
becomes a `ToolError` whose text tells the model what is allowed; `Tool.bind` guarantees it.
"""

import inspect
import itertools
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from .errors import ToolError

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__argosy_tool__"
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class ToolCall:
    """What the model asked for, e.g. `ToolCall("edit", {"line": "return x + 1"})`; nothing is checked yet."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        """As a model writes it (Hermes); for the text that a scripted `expert` answers with."""
        call = json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


def tool(method: F) -> F:
    """Offer a method of a `ToolEnv` to the model. Sync or async; anything that waits should be async.

    Parameters need type hints (str, int, float, bool, Literal, Optional, list, dict, pydantic models); the docstring
    is what the model reads, with a Google-style `Args:` section for the parameters. What the method returns is the
    answer: text as it is, other values as JSON, None as "ok".
    """
    setattr(method, _MARK, True)
    return method


def is_tool(member: object) -> bool:
    return getattr(member, _MARK, False) is True


@dataclass(frozen=True)
class Tool:
    """One tool as the model sees it (`schema`) and as the environment calls it (`function`)."""

    name: str
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel] | None
    """What checks a call's arguments; None: whoever answers the call does."""
    signature: str
    schema: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Read name, description and parameters from a method; ValueError names the parameter that lacks a type."""
        name = function.__name__
        description, documented = _parse_docstring(inspect.getdoc(function) or "")
        parameters = list(inspect.signature(function).parameters.values())[1:]  # without self
        try:
            hints = typing.get_type_hints(function, include_extras=True)
            model = pydantic.create_model(  # type: ignore[call-overload]
                name,
                __config__=pydantic.ConfigDict(extra="forbid", allow_inf_nan=False),
                # Numbered, because pydantic reserves some names for itself; a model and its errors see the aliases.
                **{f"field_{i}": _field(name, p, hints, documented.get(p.name)) for i, p in enumerate(parameters)},
            )
            parameter_schema = model.model_json_schema(schema_generator=_NoTitles)
        except (NameError, pydantic.errors.PydanticUserError) as error:
            what = str(error).splitlines()[0].partition(". Set ")[0]
            raise ValueError(
                f"tool {name}: a parameter's type hint cannot be made into a JSON schema: {what}"
            ) from error
        parameter_schema.pop("title", None)
        parameter_schema.pop("additionalProperties", None)
        schema = {"name": name, "description": description, "parameters": parameter_schema}
        if not description:
            del schema["description"]
        signature = f"{name}({', '.join(_describe(p, hints) for p in parameters)})"
        return cls(name, function, model, signature, {"type": "function", "function": schema})

    @classmethod
    def described(
        cls, name: str, description: str, parameters: Mapping[str, Any], function: Callable[..., Any]
    ) -> "Tool":
        """A tool that somebody else describes, by JSON schema, and whose arguments they check."""
        shown = ", ".join(
            f"{key}: {value.get('type', 'any')}" for key, value in parameters.get("properties", {}).items()
        )
        schema = {"name": name, "description": description, "parameters": dict(parameters)}
        return cls(name, function, None, f"{name}({shown})", {"type": "function", "function": schema})

    def bind(self, arguments: object) -> dict[str, Any]:
        """Checked and converted arguments; `ToolError` for the model when they do not fit."""
        if not isinstance(arguments, Mapping):
            raise ToolError(f"arguments must be a JSON object. Usage: {self.signature}")
        if self.arguments is None:
            return dict(arguments)
        try:
            checked = self.arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = "; ".join(_explain(e) for e in error.errors()[:3])
            raise ToolError(f"{problems}. Usage: {self.signature}") from None
        return {str(field.alias): getattr(checked, name) for name, field in self.arguments.model_fields.items()}


def as_text(result: object) -> str:
    """A tool's return value as the model reads it."""
    if result is None:
        return "ok"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


class _NoTitles(GenerateJsonSchema):
    """Titles repeat the names; a small model's prompt has no room for them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _field(tool_name: str, parameter: inspect.Parameter, hints: dict[str, Any], text: str | None) -> tuple[Any, Any]:
    if parameter.name not in hints:
        raise ValueError(f"tool {tool_name}: parameter {parameter.name!r} needs a type hint")
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ValueError(f"tool {tool_name}: parameter {parameter.name!r} must be an ordinary named parameter")
    default = ... if parameter.default is parameter.empty else parameter.default
    return hints[parameter.name], pydantic.Field(default, alias=parameter.name, description=text)


def _describe(parameter: inspect.Parameter, hints: dict[str, Any]) -> str:
    hint = hints[parameter.name]
    shown = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {shown}{default}"


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"there is no argument {where}"
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description (all before the first section) and the text of each entry of a Google-style `Args:`."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _SECTION.match(line)] + [len(lines)]
    description = "\n".join(lines[: starts[0]]).strip()
    arguments: dict[str, str] = {}
    for start, end in itertools.pairwise(starts):
        if lines[start].startswith(("Args", "Arguments", "Parameters")):
            arguments = _parse_arguments(lines[start + 1 : end])
    return description, arguments


def _parse_arguments(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    current = ""
    for line in filter(str.strip, lines):
        entry = _ARGUMENT.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if entry:
            current = entry[1]
            found[current] = entry[2].strip()
        elif current:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found
