"""Runs test files of a directory task inside a sandbox: `python3 run_tests.py SECONDS FILE...`.

Standard library only, whatever `python3` (>= 3.9) is there: unittest cases and plain `test*` functions, with as much of
pytest as small task sets use (marks, parametrize, approx, raises, skip). Prints a line per test as `pytest -rA` does in
its summary, `PASSED file::Class::test` or `FAILED file::Class::test - why`, and exits with 0 if there was a test and
all passed.

Invariant: what the tested code prints is no report, and its end is not ours: the tests run in a child, whose output is
thrown away and whose results come through a pipe; a test without a result has failed. Each test has its own deadline,
and all together one by the clock.
"""

# It makes a module and a test case as it goes, which types do not follow; pathlib costs a fork its start.
# mypy: ignore-errors
# ruff: noqa: PTH100, PTH109, PTH119, PTH120, PTH123

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import resource
import select
import signal
import sys
import time
import types
import unittest

EACH = 10  # seconds of processor time for one test: a busy machine fails nobody
MEMORY = 384 << 20  # bytes of address space: a runaway test is a failed test, not a dead sandbox


def main(seconds, files):
    deadline = time.monotonic() + seconds
    passed = []
    for file in files:
        results = collect(file, deadline)
        for name in names(file):
            why = results.get(name, "no result: the test run ended before it")
            passed.append(why is None)
            print(f"PASSED {file}::{name}" if why is None else f"FAILED {file}::{name} - {why}", flush=True)
    sys.exit(0 if passed and all(passed) else 1)


def names(file):
    """Tests by reading the file, not by running it."""
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read(), file)
    return list(test_names(tree))


def test_names(tree):
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases):
            yield from (f"{node.name}::{item.name}" for item in node.body if is_test(item))
        elif is_test(node):
            yield node.name


def is_test(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")


def collect(file, deadline):
    """Results by name: None, or why it failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        child(file, writer)
    os.close(writer)
    received = b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        received += chunk
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    results = {}
    for line in received.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, TypeError):
            name, why = json.loads(line)
            results[name] = why if results.get(name) is None else results[name]
    return results


def child(file, writer):
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.path[:0] = [os.path.dirname(os.path.abspath(file)), os.getcwd()]
        sys.modules["pytest"] = small_pytest(file)
        report = functools.partial(tell, writer)
        wanted = names(file)
        try:
            with limited(EACH):
                spec = importlib.util.spec_from_file_location(os.path.basename(file)[:-3], file)
                module = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = module
                spec.loader.exec_module(module)
        except BaseException as error:
            for name in wanted:
                report(name, describe(error))
            os._exit(0)
        for name in wanted:
            report(name, run(module, *name.split("::")))
    finally:
        os._exit(0)


def tell(writer, name, why):
    line = json.dumps([name, why]).encode() + b"\n"
    while line:
        line = line[os.write(writer, line) :]


def run(module, *path):
    """None when it passed, else why not."""
    try:
        with limited(EACH):
            if len(path) == 1:
                function = getattr(module, path[0])
                for case in getattr(function, "cases", [{}]):
                    with contextlib.suppress(Skipped):
                        function(**case)
                return None
            result = unittest.TestResult()
            case = getattr(module, path[0])
            suite = unittest.TestSuite([case(path[1])])
            with contextlib.redirect_stdout(io.StringIO()):
                suite.run(result)
            for _, trace in result.failures + result.errors:
                return trace.strip().splitlines()[-1][:300]
            by_decorator = any(getattr(thing, "__unittest_skip__", False) for thing in (case, getattr(case, path[1])))
            return "did not run" if result.skipped and not by_decorator else None
    except BaseException as error:
        return describe(error)


@contextlib.contextmanager
def limited(seconds):
    def late(number, frame):
        raise TimeoutError(f"no result within {seconds} s of processor time")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again and again: the code may swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def describe(error):
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except BaseException:
        return type(error).__name__


class Skipped(Exception):
    """A test skipped itself; the code under test cannot."""


def small_pytest(file):
    def parametrize(arguments, rows):
        names = [name.strip() for name in arguments.split(",")] if isinstance(arguments, str) else list(arguments)

        def mark(function):
            function.cases = [dict(zip(names, row if len(names) > 1 else (row,))) for row in rows]
            return function

        return mark

    def skip(reason=""):
        if os.path.abspath(sys._getframe(1).f_code.co_filename) != os.path.abspath(file):
            raise RuntimeError("only a test skips itself")
        raise Skipped(reason)

    class Marks:
        def __getattr__(self, name):
            return lambda *args, **_: args[0] if len(args) == 1 and inspect.isroutine(args[0]) else lambda thing: thing

    marks = Marks()
    marks.parametrize = parametrize
    pytest = types.ModuleType("pytest")
    pytest.mark, pytest.skip, pytest.approx = marks, skip, Approx
    pytest.raises = lambda kind, match=None: unittest.TestCase().assertRaisesRegex(kind, match or "")
    pytest.use_correct = pytest.run_slow = False  # options of QuixBugs
    return pytest


class Approx:
    def __init__(self, expected, rel=1e-6, abs=1e-12):
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other):
        return math.isclose(other, self.expected, rel_tol=self.rel, abs_tol=self.abs)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
