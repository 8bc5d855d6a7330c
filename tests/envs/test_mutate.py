"""Mutations are bugs that people make: one small edit inside a function, and nothing else of the source changes."""

import ast
import heapq
import json.decoder
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from argosy.envs.tasks.mutate import Edit, apply, functions, mutations


def bodies(source: str, operator: str | None = None) -> list[str]:
    """What becomes of the one-line body of `source`, by each mutation."""
    found = [m for m in mutations(source) if operator in (None, m.operator)]
    return [apply(source, [m.edit]).splitlines()[-1].strip() for m in found]


@pytest.mark.parametrize(
    ("operator", "line", "expected"),
    [
        ("comparison", "return a < b", ["return a <= b", "return a > b"]),
        ("comparison", "return (a)  is  not  (b)", ["return (a)  is  (b)"]),
        ("comparison", "return a not in b", ["return a in b"]),
        ("arithmetic", "return (a) - (b)", ["return (a) + (b)"]),
        ("arithmetic", "a //= b", ["a /= b"]),
        ("lost accumulation", "a += b", ["a = b"]),
        ("and/or", "return a and b", ["return a or b"]),
        ("missing condition", "return a and b", ["return a"]),
        ("negated condition", "return a if a or b else b", ["return a if not (a or b) else b"]),
        ("negated condition", "return not  a", ["return a"]),
        ("off by one", "return a[1]", ["return a[2]", "return a[0]"]),
        ("slice bound", "return a[b:]", ["return a[:]", "return a[b + 1:]"]),
        ("swapped arguments", "return pow(a,  b)", ["return pow(b,  a)"]),
        ("missing argument", "return sorted(a, key=b)", ["return sorted(a)"]),
        ("wrong call", "return max(a, b)", ["return min(a, b)"]),
        ("wrong call", "return a.lstrip()", ["return a.rstrip()"]),
        ("wrong variable", "return [a]", ["return [b]"]),
        ("wrong constant", "return a, True", ["return a, False"]),
        ("lost sign", "return -a", ["return a"]),
        ("removed step", "a.append(b)", ["pass"]),
        ("arithmetic", "return 'é', a + b", ["return 'é', a - b"]),
    ],
)
def test_an_operator_changes_just_this(operator: str, line: str, expected: list[str]) -> None:
    assert bodies(f"def f(a, b):\n    {line}\n", operator) == expected


def test_a_default_is_tried_by_whoever_runs_the_body() -> None:
    source = "def f(a=1, *, b=True):\n    x = a\n    return x, b\n"
    found = [m for m in mutations(source) if m.operator == "wrong default"]
    assert [apply(source, [m.edit]).splitlines()[0] for m in found] == [
        "def f(a=2, *, b=True):",
        "def f(a=0, *, b=True):",
        "def f(a=1, *, b=False):",
    ]
    assert {(m.first, m.last) for m in found} == {(2, 3)}


def test_a_branch_goes_with_its_lines_and_its_comment() -> None:
    source = "def f(a):\n    if a:\n        return 1  # early\n    # kept\n    return 2\n"
    removed = next(m for m in mutations(source) if m.operator == "removed branch")
    assert apply(source, [removed.edit]) == "def f(a):\n    # kept\n    return 2\n"


def test_what_does_not_run_in_a_function_stays() -> None:
    source = (
        '@wraps(1 + 1)\ndef f(a: "1 < 2" = None) -> 3:\n'
        '    """1 + 1"""\n    b: 4\n    return f"{5 + 6} {a!r:>7}"\n\nx = 8 < 9\n'
    )
    assert mutations(source) == []


def test_line_ends_stay_as_they_are() -> None:
    source = "def f(a, b):\r\n    # é\r\n    return a < b\r\n"
    (edit,) = [m.edit for m in mutations(source) if m.edit.text == "<="]
    assert apply(source, [edit]) == source.replace("<", "<=")
    assert mutations("def f(a, b):\r    return a < b\n") == []


@pytest.mark.parametrize("module", [textwrap, heapq, json.decoder])
def test_the_rest_of_a_real_module_stays_byte_for_byte(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text()
    spans = {name: (node.lineno, node.end_lineno or 0) for name, node in functions(ast.parse(source))}
    found = mutations(source)
    assert len(found) > 100 and len({m.operator for m in found}) >= 10
    assert found == mutations(source)
    before = source.splitlines()
    for mutation in found[::11]:
        after = apply(source, [mutation.edit])
        compile(after, "mutant", "exec")
        assert after != source
        first, last = spans[mutation.function]
        kept = len(before) - last
        assert after.splitlines()[: first - 1] == before[: first - 1], mutation
        assert after.splitlines()[-kept:] == before[-kept:] or not kept, mutation


def test_several_edits_count_from_the_same_source_and_may_not_meet() -> None:
    assert apply("abcdef", [Edit(4, 5, "EE"), Edit(0, 2, "")]) == "cdEEf"
    with pytest.raises(ValueError, match="overlap"):
        apply("abcdef", [Edit(0, 3, "x"), Edit(2, 4, "y")])
    with pytest.raises(ValueError, match="outside"):
        apply("abc", [Edit(2, 9, "x")])
