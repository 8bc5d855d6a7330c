"""Bugs that people make, put into Python source: each is one edit of a few characters, the rest stays byte for byte.

Invariant: `mutations` depends on the source alone, in a fixed order; every edit lies inside a function (its defaults
included), and never in a docstring, an annotation, a decorator or an f-string. Whether an edit changes what anybody can
see is for tests to tell: some of them are equivalent.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: (r"<", ("<=", ">")),
    ast.LtE: (r"<=", ("<", ">=")),
    ast.Gt: (r">", (">=", "<")),
    ast.GtE: (r">=", (">", "<=")),
    ast.Eq: (r"==", ("!=",)),
    ast.NotEq: (r"!=", ("==",)),
    ast.Is: (r"\bis\b", ("is not",)),
    ast.IsNot: (r"\bis\s+not\b", ("is",)),
    ast.In: (r"\bin\b", ("not in",)),
    ast.NotIn: (r"\bnot\s+in\b", ("in",)),
}
_NEGATED_BY_A_FLIP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "/"),
    ast.Mod: (r"%", "//"),
    ast.Pow: (r"\*\*", "*"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
}
_TWINS = [
    ("min", "max"),
    ("any", "all"),
    ("floor", "ceil"),
    ("startswith", "endswith"),
    ("lstrip", "rstrip"),
    ("lower", "upper"),
    ("find", "rfind"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("append", "extend"),
    ("keys", "values"),
    ("union", "intersection"),
    ("ljust", "rjust"),
    ("popleft", "pop"),
]
_TWIN = {name: twin for a, b in _TWINS for name, twin in ((a, b), (b, a))}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Edit:
    """Replace the characters from `start` up to `end` by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutation:
    """E.g. `Mutation("comparison", "Table.rows", 12, 12, Edit(301, 302, "<="))`."""

    operator: str
    function: str
    """Qualified by its classes; what stands in an inner function belongs to the outer one."""
    first: int
    last: int
    """The lines of the statement: a test that runs none of them cannot notice."""
    edit: Edit


def mutations(source: str) -> list[Mutation]:
    """Every single edit known here; SyntaxError when the source is not Python. Each result compiles."""
    if "\r" in source.replace("\r\n", "\n"):
        return []  # a lone carriage return is a line's end for Python only
    tree = ast.parse(source)
    text = _Text(source)
    return [
        mutation
        for name, function in functions(tree)
        for mutation in dict.fromkeys(_Finder(text, name, function).found)
        if _compiles(text, function, mutation.edit)
    ]


def apply(source: str, edits: Iterable[Edit]) -> str:
    """The edited source; ValueError when two edits meet."""
    after = len(source)
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        if not 0 <= edit.start <= edit.end <= after:
            raise ValueError("edits overlap, or lie outside the source")
        source, after = source[: edit.start] + edit.text + source[edit.end :], edit.start
    return source


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods by their qualified names, also those under an `if` or `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from functions(node, prefix)


class _Text:
    """The source, addressed as `ast` does: lines from 1, columns in bytes of UTF-8."""

    def __init__(self, source: str):
        self.source = source
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self.start(node) : self.end(node)]

    def first_character(self, node: ast.expr | ast.stmt) -> int:
        """Of its first line, with the indentation."""
        return self._starts[node.lineno - 1]

    def whole_lines(self, node: ast.stmt) -> tuple[int, int] | None:
        """From the first character of its first line to the end of its last; None when it shares them."""
        assert node.end_lineno is not None
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        before, after = self.source[start : self.start(node)], self.source[self.end(node) : end]
        alone = not before.strip() and (not after.strip() or after.strip().startswith("#"))
        return (start, min(end, len(self.source))) if alone else None

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))


class _Finder(ast.NodeVisitor):
    """All mutations of one function."""

    def __init__(self, text: _Text, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef):
        self.found: list[Mutation] = []
        self._text, self._name = text, name
        self._variables = _variables(function)
        self._lines = (function.body[0].lineno, function.body[-1].end_lineno or 0)
        for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
            self._default(default)
        self._block(function.body)

    def _add(self, operator: str, start: int, end: int, text: str) -> None:
        if self._text.source[start:end] != text:
            self.found.append(Mutation(operator, self._name, *self._lines, Edit(start, end, text)))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self._add(operator, self._text.start(node), self._text.end(node), text)

    def _between(self, operator: str, left: ast.expr, right: ast.expr, pattern: str, text: str) -> None:
        """Replace what matches in the gap between two operands, where only brackets and comments stand beside it."""
        start = self._text.end(left)
        gap = re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), self._text.source[start : self._text.start(right)])
        if match := re.search(pattern, gap):
            self._add(operator, start + match.start(), start + match.end(), text)

    # Statements.

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.ClassDef) or _is_docstring(statement):
                continue
            inner = [value for _, value in ast.iter_fields(statement) if isinstance(value, list)]
            blocks = [value for value in inner if value and isinstance(value[0], ast.stmt)]
            header = min((block[0].lineno for block in blocks), default=0) - 1
            last = max(header, statement.lineno) if blocks else statement.end_lineno
            self._lines = (statement.lineno, last or statement.lineno)
            self._remove(statement, alone=len(statements) == 1)
            if not isinstance(statement, _FUNCTIONS):
                self._header(statement)
            for block in blocks:
                self._block(block)
            for handler in [h for value in inner for h in value if isinstance(h, ast.ExceptHandler | ast.match_case)]:
                self._block(handler.body)

    def _header(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self.visit(statement.value)
            return
        if isinstance(statement, ast.AugAssign):
            self._augmented(statement)
        if isinstance(statement, ast.If | ast.While):
            self._negate(statement.test)
        if isinstance(statement, ast.Break):
            self._replace("loop exit", statement, "continue")
        if isinstance(statement, ast.Continue):
            self._replace("loop exit", statement, "break")
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr | ast.withitem):
                self.visit(child)

    def _remove(self, statement: ast.stmt, alone: bool) -> None:
        """A branch without an else, an early return, or a step whose only purpose is its effect."""
        branch = isinstance(statement, ast.If) and not statement.orelse
        step = isinstance(statement, ast.AugAssign) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        )
        if isinstance(statement, ast.Assign):
            step = all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
        lines = self._text.whole_lines(statement)
        if not (branch or step) or lines is None:
            return
        what = "removed branch" if branch else "removed step"
        if alone and not self._text.of(statement).startswith("elif"):
            self._replace(what, statement, "pass")
        else:
            self._add(what, *lines, "")

    def _augmented(self, statement: ast.AugAssign) -> None:
        pattern, other = _ARITHMETIC.get(type(statement.op), ("", ""))
        if other:
            self._between("arithmetic", statement.target, statement.value, pattern + "=", other + "=")
            self._between("lost accumulation", statement.target, statement.value, pattern + "=", "=")

    # Expressions.

    def _default(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant):
            self._constant(node, "wrong default")

    def _negate(self, test: ast.expr) -> None:
        flipped = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _NEGATED_BY_A_FLIP)
        if flipped or isinstance(test, ast.UnaryOp | ast.Constant | ast.NamedExpr):
            return
        text = self._text.of(test)
        self._replace("negated condition", test, f"not ({text})" if isinstance(test, ast.BoolOp) else f"not {text}")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Positions inside f-strings are not to be trusted before Python 3.12."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            pattern, others = _COMPARISONS[type(operator)]
            for other in others:
                self._between("comparison", left, right, pattern, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pattern, other = _ARITHMETIC.get(type(node.op), ("", ""))
        if other and not (_is_text(node.left) or _is_text(node.right)):
            self._between("arithmetic", node.left, node.right, pattern, other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._between("and/or", left, right, rf"\b{word}\b", other)
            start, end = self._text.end(left), self._text.end(right)
            if self._text.source[start : self._text.start(right)].split() == [word]:
                self._add("missing condition", start, end, "")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        word = {ast.Not: "not", ast.USub: "-"}.get(type(node.op))
        start, end = self._text.start(node), self._text.start(node.operand)
        if word and self._text.source[start:end].strip() == word:
            self._add("negated condition" if word == "not" else "lost sign", start, end, "")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant(node, "wrong constant")

    def _constant(self, node: ast.Constant, operator: str) -> None:
        if isinstance(node.value, bool):
            self._replace(operator, node, str(not node.value))
        elif isinstance(node.value, int) and self._text.of(node).isdecimal():
            self._replace("off by one" if operator == "wrong constant" else operator, node, str(node.value + 1))
            if node.value > 0:
                self._replace("off by one" if operator == "wrong constant" else operator, node, str(node.value - 1))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound, shift in ((node.lower, "+"), (node.upper, "-")):
            if bound is not None:
                self._replace("slice bound", bound, "")
                if isinstance(bound, ast.Name | ast.Attribute | ast.BinOp):
                    self._replace("slice bound", bound, f"{self._text.of(bound)} {shift} 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred | ast.GeneratorExp)]
        if len(plain) >= 2 and plain[:2] == node.args[:2]:
            a, b = plain[:2]
            start, end = self._text.start(a), self._text.end(b)
            middle = self._text.source[self._text.end(a) : self._text.start(b)]
            self._add("swapped arguments", start, end, self._text.of(b) + middle + self._text.of(a))
        if node.keywords and node.keywords[-1].arg and len(node.args) + len(node.keywords) > 1:
            before = node.keywords[-2].value if len(node.keywords) > 1 else node.args[-1]
            self._add("missing argument", self._text.end(before), self._text.end(node.keywords[-1].value), "")
        self._call_twin(node.func)
        for child in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(child)
        if not isinstance(node.func, ast.Name):
            self.visit(node.func)

    def _call_twin(self, function: ast.expr) -> None:
        end = self._text.end(function)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _TWIN:
            self._add("wrong call", end - len(name), end, _TWIN[name])

    def visit_Name(self, node: ast.Name) -> None:
        """The variable that follows in the alphabet, among those that have a value by now."""
        if isinstance(node.ctx, ast.Load) and node.id in self._variables:
            known = sorted(name for name, line in self._variables.items() if line < node.lineno or name == node.id)
            self._replace("wrong variable", node, known[(known.index(node.id) + 1) % len(known)])


def _compiles(text: "_Text", function: ast.FunctionDef | ast.AsyncFunctionDef, edit: Edit) -> bool:
    """The function alone: a module takes a hundred times longer."""
    start, end = text.first_character(function), text.end(function)
    shifted = Edit(edit.start - start, min(edit.end, end) - start, edit.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as `is` beside a literal
        try:
            compile("if 1:\n" * bool(function.col_offset) + apply(text.source[start:end], [shifted]), "mutant", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


def _variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, int]:
    """The function's own names and the line where each is first given a value."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found = {argument.arg: function.lineno for argument in named if argument and argument.arg not in ("self", "cls")}
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = min(node.lineno, found.get(node.id, node.lineno))
        own_scope = (*_FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        if not isinstance(node, own_scope):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
