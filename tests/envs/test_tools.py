"""Signatures become schemas, and a model's mistakes become text."""

from typing import Any, Literal

import pytest
from argosy.envs import Tool, ToolCall, ToolError, tool


class Desk:
    @tool
    def edit(
        self,
        path: str,
        line: int = 1,
        mode: Literal["insert", "replace"] = "replace",
        note: str | None = None,
        tags: list[str] = [],  # noqa: B006
        share: float = 0.5,
    ) -> str:
        """Change one line.

        The file must exist.

        Args:
            path: relative to the workspace
            line (int): counted
                from one
        Returns:
            not for the model
        """
        return f"{path}:{line}:{mode}:{note}:{tags}:{share}"


def test_schema_in_openai_format() -> None:
    assert Tool.of(Desk.edit).schema == {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Change one line.\n\nThe file must exist.",
            "parameters": {
                "type": "object",
                "required": ["path"],
                "properties": {
                    "path": {"type": "string", "description": "relative to the workspace"},
                    "line": {"type": "integer", "default": 1, "description": "counted from one"},
                    "mode": {"type": "string", "enum": ["insert", "replace"], "default": "replace"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                    "share": {"type": "number", "default": 0.5},
                },
            },
        },
    }


def test_arguments_are_converted() -> None:
    bound = Tool.of(Desk.edit).bind({"path": "a.py", "line": "3", "share": 1})
    assert bound == {"path": "a.py", "line": 3, "mode": "replace", "note": None, "tags": [], "share": 1.0}


def test_defaults_are_not_shared_between_calls() -> None:
    edit = Tool.of(Desk.edit)
    edit.bind({"path": "a"})["tags"].append("x")
    assert edit.bind({"path": "a"})["tags"] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "path is missing"),
        ({"path": 3}, "path: input should be a valid string"),
        ({"path": "a", "mode": "append"}, "mode: input should be 'insert' or 'replace'"),
        ({"path": "a", "share": float("nan")}, "share: input should be a finite number"),
        ({"path": "a", "lines": 3}, "there is no argument lines"),
        ({"path": "a", "tags": ["x", 1]}, "tags.1: input should be a valid string"),
        (["a"], "arguments must be a JSON object"),
        ("a", "arguments must be a JSON object"),
        (None, "arguments must be a JSON object"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: Any, expected: str) -> None:
    with pytest.raises(ToolError) as caught:
        Tool.of(Desk.edit).bind(arguments)
    assert str(caught.value).startswith(expected)
    assert "Usage: edit(path: str, line: int = 1, mode: Literal['insert', 'replace'] = 'replace'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_parameter_without_a_type_is_refused_at_once() -> None:
    class Sloppy:
        @tool
        def go(self, where):
            return where

    with pytest.raises(ValueError, match="tool go: parameter 'where' needs a type hint"):
        Tool.of(Sloppy.go)


def test_a_type_without_a_schema_is_refused_at_once() -> None:
    class Sloppy:
        @tool
        def go(self, where: object.__class__.__base__.__subclasses__) -> None: ...  # type: ignore[name-defined]

        @tool
        def come(self, where: "NoSuchType") -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(ValueError, match="tool go: a parameter's type hint cannot be made into a JSON schema"):
        Tool.of(Sloppy.go)
    with pytest.raises(ValueError, match=r"tool come: .*name 'NoSuchType' is not defined"):
        Tool.of(Sloppy.come)


def test_a_call_as_a_model_writes_it() -> None:
    call = ToolCall("edit", {"path": "ä.py", "line": 1})
    assert str(call) == '<tool_call>\n{"name": "edit", "arguments": {"path": "ä.py", "line": 1}}\n</tool_call>'


def test_a_tool_that_others_describe_passes_arguments_on() -> None:
    described = Tool.described("find", "Find.", {"properties": {"word": {"type": "string"}, "n": {}}}, print)
    assert described.signature == "find(word: string, n: any)"
    assert described.bind({"anything": [1]}) == {"anything": [1]}
    with pytest.raises(ToolError, match="must be a JSON object"):
        described.bind("word")


def test_awkward_parameter_names_work() -> None:
    class Awkward:
        @tool
        def go(self, schema: str, copy: int = 1, model_config: str = "", _hidden: bool = False, json: str = "") -> str:
            return f"{schema}{copy}{model_config}{_hidden}{json}"

    go = Tool.of(Awkward.go)
    assert list(go.schema["function"]["parameters"]["properties"])[:2] == ["schema", "copy"]
    assert Awkward().go(**go.bind({"schema": "a", "json": "b", "model_config": "c", "_hidden": True})) == "a1cTrueb"
