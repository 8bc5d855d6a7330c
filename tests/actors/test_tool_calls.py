import pytest
from argosy.actors.tool_calls import parse
from argosy.envs import ToolCall
from hypothesis import given
from hypothesis import strategies as st

CALL = '<tool_call>\n{"name": "edit", "arguments": {"line": "return x + 1"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("I am done.", "I am done.", []),
        (CALL, "", [ToolCall("edit", {"line": "return x + 1"})]),
        (f"Let me fix it.\n{CALL}", "Let me fix it.", [ToolCall("edit", {"line": "return x + 1"})]),
        (CALL + CALL, "", [ToolCall("edit", {"line": "return x + 1"})] * 2),
        ('<tool_call>{"name": "run_tests"}</tool_call>', "", [ToolCall("run_tests", {})]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "a\\n\\ud83d\\ude00"}}</tool_call>',
            "",
            [ToolCall("say", {"text": "a\n😀"})],
        ),
    ],
)
def test_well_formed(text, content, calls):
    assert parse(text) == (content, calls, None)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "</tool_call>",
        '<tool_call>{"name": "edit"',
        "<tool_call></tool_call>",
        "<tool_call>edit(1)</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>"edit"</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "edit", "arguments": {"a": "\\ud800"}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
        f"{CALL}<tool_call>{{</tool_call>",  # one bad call voids the good one
        f"<tool_call>{CALL}",
    ],
)
def test_malformed(text):
    _, calls, error = parse(text)
    assert not calls and error and len(error) < 100


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"a"', ",", "[", "\\u", "\ud800", "x"])
    )
)
def test_never_raises(parts):
    _, calls, error = parse("".join(parts))
    assert error is None or not calls
