"""Test logs, read strictly: which test came out how.

Invariant: a log is a claim, not a proof: everything in it may have been printed by the code under test. So a test that
is reported twice has the worse of both outcomes, a report without a test is `InvalidGrade`, and so is one that
disagrees with the exit status of the command that printed it.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ..errors import InvalidGrade

Format = Literal["pytest", "unittest", "junit"]
Outcome = Literal["passed", "xfailed", "skipped", "xpassed", "failed", "error"]

OUTCOMES: tuple[Outcome, ...] = ("passed", "xfailed", "skipped", "xpassed", "failed", "error")
"""From good to bad."""

_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?)(?: - .*)?$")
_PYTEST_VERBOSE = re.compile(r"^(\S+\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(.*\))?(?: +\[ *\d+%\])?$")
_UNITTEST = re.compile(r"^(.+?) \.\.\. (?:.*?)(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_UNITTEST_NAME = re.compile(r"^\w+ \([\w.]+\)$")
_UNITTEST_FAILED = re.compile(r"^(FAIL|ERROR): (\w+ \([\w.]+\))")
_WORDS: Mapping[str, Outcome] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XPASS": "xpassed",
    "ok": "passed",
    "FAIL": "failed",
    "expected failure": "xfailed",
    "unexpected success": "failed",
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_report(log: str, form: Format, exit: int) -> dict[str, Outcome]:
    """Outcome by test; `InvalidGrade` when there is none or the exit status tells another story."""
    outcomes = worst(_PARSERS[form](_ESCAPES.sub("", log).replace("\r\n", "\n")))
    if not outcomes:
        raise InvalidGrade(f"the {form} report names no test (exit status {exit})")
    bad = sorted(test for test, outcome in outcomes.items() if outcome in ("failed", "error"))
    if exit == 0 and bad:
        raise InvalidGrade(f"the log says that {bad[0]} failed, but the command ended with 0")
    if exit != 0 and not bad:
        raise InvalidGrade(f"the log knows of no failure, but the command ended with {exit}")
    return outcomes


def worst(reports: Iterable[tuple[str, Outcome]]) -> dict[str, Outcome]:
    """One outcome per test: whoever reports twice cannot take back the first."""
    outcomes: dict[str, Outcome] = {}
    for test, outcome in reports:
        name = same_name(test)
        outcomes[name] = max(outcomes.get(name, "passed"), outcome, key=OUTCOMES.index)
    return outcomes


def same_name(test: str) -> str:
    """unittest's "test_a (m.C.test_a)" (from Python 3.11 on) and "test_a (m.C)" are the same test."""
    found = re.fullmatch(r"(\w+) \(([\w.]+)\.\1\)", test)
    return f"{found[1]} ({found[2]})" if found else test


def junit_name(test: str) -> str:
    """What pytest or unittest call a test, as a junit report does: "a.test_b.C::test_d"."""
    if found := re.fullmatch(r"(\w+) \(([\w.]+)\)", same_name(test)):
        return f"{found[2]}::{found[1]}"
    place, _, name = test.rpartition("::")
    file, *classes = place.split("::")
    return f"{'.'.join([file.removesuffix('.py').replace('/', '.'), *classes])}::{name}"


def _pytest(log: str) -> Iterable[tuple[str, Outcome]]:
    """Lines of the short summary (-rA) and of the verbose progress (-v)."""
    for line in log.splitlines():
        if found := _PYTEST.match(line):
            if not found[2].startswith("["):  # "SKIPPED [1] file.py:3: why" names no test
                yield found[2], _WORDS[found[1]]
        elif found := _PYTEST_VERBOSE.match(line):
            yield found[1], _WORDS[found[2]]


def _unittest(log: str) -> Iterable[tuple[str, Outcome]]:
    """A test with a docstring has two lines, its name and then that text; either may be what it is asked for by."""
    before = ""
    for line in log.splitlines():
        if found := _UNITTEST.match(line):
            outcome = _WORDS.get(found[2], "skipped")
            yield found[1], outcome
            if _UNITTEST_NAME.match(before):
                yield before, outcome
        elif found := _UNITTEST_FAILED.match(line):
            yield found[2], _WORDS[found[1]]
        before = line


def _junit(log: str) -> Iterable[tuple[str, Outcome]]:
    """The one XML document in the log. Names are "classname::name", as pytest and others write them."""
    documents = re.findall(r"<\?xml.*?</testsuites?>\s*(?=<\?xml|\Z|[^<\s])", log, re.S)
    if len(documents) != 1 or "<!DOCTYPE" in documents[0] or "<!ENTITY" in documents[0]:
        raise InvalidGrade(f"the log must hold exactly one junit document, not {len(documents)}")
    try:
        root = ET.fromstring(documents[0])
    except ET.ParseError as error:
        raise InvalidGrade(f"the junit report cannot be read: {error}") from None
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome: Outcome = "passed"
        for tag, worse in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            if tag in kinds:
                outcome = worse  # type: ignore[assignment]
        yield f"{case.get('classname', '')}::{case.get('name', '')}", outcome


_PARSERS: Mapping[Format, Callable[[str], Iterable[tuple[str, Outcome]]]] = {
    "pytest": _pytest,
    "unittest": _unittest,
    "junit": _junit,
}
