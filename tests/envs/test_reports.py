"""Reward files, test logs and journals: what is believed and what is refused. No sandbox needed."""

import json
from typing import Any

import pytest
from argosy.envs import InvalidGrade
from argosy.envs.grading.reports import parse_report
from argosy.envs.grading.rewards import read_reward
from argosy.envs.grading.testimony import Testimony, read_journal
from argosy.envs.grading.verdicts import Evidence, judge
from argosy.envs.tasks import ExitStatus, NamedTests, RewardFile, TestOutcomes

PYTEST = "PASSED tests/test_a.py::test_one\nPASSED tests/test_a.py::TestB::test_two[x - y]\n"


def test_a_reward_is_one_finite_number_to_the_letter() -> None:
    assert read_reward({"reward.txt": b" 0.5\n"}) == {"reward": 0.5}
    assert read_reward({"reward.txt": b"1e-1"}) == {"reward": 0.1}
    assert read_reward({"reward.json": b'{"a": 1, "b": 0}'}) == {"a": 1.0, "b": 0.0, "reward": 0.5}
    both = {"reward.json": b'{"reward": 0.25, "style": 1}', "reward.txt": b"1"}
    assert read_reward(both) == {"reward": 0.25, "style": 1.0}, "json first"
    assert read_reward({"reward.txt": b"-3"}, least=-5)["reward"] == -3
    for text in ("", "1 2", "1\n1", "nan", "inf", "1e999", "0x1", "1_0", "True", "1 # ok", "2", "-0.1", "\ufffd"):
        with pytest.raises(InvalidGrade):
            read_reward({"reward.txt": text.encode()})
    unreadable = ["", "{}", "[1]", "1", "[" * 100_000, '{"a": {"b": 1}}', '{"reward": 0, "reward": 1}']
    for value in ("true", '"1"', "NaN", "1e999", "7", "null"):
        unreadable.append(f'{{"reward": {value}}}')
    for text in unreadable:
        with pytest.raises(InvalidGrade):
            read_reward({"reward.json": text.encode(), "reward.txt": b"1"})
    with pytest.raises(InvalidGrade, match="neither"):
        read_reward({})


def test_pytest_logs() -> None:
    assert parse_report(PYTEST, "pytest", 0) == {
        "tests/test_a.py::test_one": "passed",
        "tests/test_a.py::TestB::test_two[x": "passed",
    }
    verbose = "tests/a.py::test_one \x1b[32mPASSED\x1b[0m     [ 50%]\ntests/a.py::test_two SKIPPED (why) [100%]\r\n"
    assert parse_report(verbose, "pytest", 0) == {"tests/a.py::test_one": "passed", "tests/a.py::test_two": "skipped"}
    forged = "PASSED a.py::test_one\nFAILED a.py::test_one - AssertionError\nPASSED a.py::test_one\n"
    assert parse_report(forged, "pytest", 1) == {"a.py::test_one": "failed"}, "nobody takes back a failure"


def test_unittest_logs() -> None:
    log = "test_a (m.C.test_a) ... ok\ntest_b (m.C)\nSays what it does ... FAIL\n\nFAIL: test_b (m.C)\n"
    assert parse_report(log, "unittest", 1) == {
        "test_a (m.C)": "passed",
        "test_b (m.C)": "failed",
        "Says what it does": "failed",
    }


def test_junit_reports() -> None:
    case = '<testcase classname="m.C" name="{}">{}</testcase>'
    report = f'<?xml version="1.0"?><testsuites><testsuite>{case.format("a", "")}{case.format("b", "<failure/>")}'
    report += "</testsuite></testsuites>"
    assert parse_report("noise\n" + report + "\n", "junit", 1) == {"m.C::a": "passed", "m.C::b": "failed"}
    with pytest.raises(InvalidGrade, match="exactly one"):
        parse_report(report + "\n" + report, "junit", 1)
    bomb = report.replace("<testsuites>", '<!DOCTYPE x [<!ENTITY a "aa">]><testsuites>')
    with pytest.raises(InvalidGrade):
        parse_report(bomb, "junit", 1)


@pytest.mark.parametrize("form", ["pytest", "unittest", "junit"])
def test_an_empty_report_is_no_pass(form: Any) -> None:
    for log in ("", "5 passed in 0.1s", "OK", "<testsuites></testsuites>"):
        with pytest.raises(InvalidGrade):
            parse_report(log, form, 0)


def test_a_log_that_disagrees_with_the_exit_status_is_not_believed() -> None:
    with pytest.raises(InvalidGrade, match="no failure"):
        parse_report(PYTEST, "pytest", 1)
    with pytest.raises(InvalidGrade, match="failed, but"):
        parse_report("FAILED a.py::t - x\n", "pytest", 0)


def test_named_tests() -> None:
    verdict = NamedTests(("a.py::t1",), ("a.py::t2",))
    log = "PASSED a.py::t1\nPASSED a.py::t2\nFAILED a.py::unrelated - x\n"
    assert judge(verdict, Evidence(1, log)).reward == 1.0, "what nobody asked for may fail"
    grade = judge(verdict, Evidence(1, log.replace("PASSED a.py::t2", "FAILED a.py::t2 - x")))
    assert grade.reward == 0.0 and grade.parts == {"fail_to_pass": 1.0, "pass_to_pass": 0.0}
    assert judge(verdict, Evidence(0, "PASSED a.py::t1\n")).reward == 0.0, "a test that was not run has not passed"
    cut = judge(NamedTests(("a.py::t[x",)), Evidence(0, testimony=journal(("test", "a.py::t[x y]", "passed"))))
    assert cut.reward == 1.0, "SWE-bench cuts names at a space"


def test_outcomes_must_be_equal_no_more_and_no_fewer() -> None:
    verdict = TestOutcomes({"t1": "PASSED", "C.t2": "FAILED"})
    log = "PASSED a.py::t1\nFAILED a.py::C::t2 - x\n"
    assert judge(verdict, Evidence(1, log)).reward == 1.0
    assert judge(verdict, Evidence(0, log.replace("FAILED", "PASSED").replace(" - x", ""))).reward == 0.0
    assert judge(verdict, Evidence(1, log + "PASSED a.py::t3\n")).reward == 0.0
    assert judge(verdict, Evidence(1, "FAILED a.py::C::t2 - x\n")).reward == 0.0


def test_the_witness_takes_away_what_the_command_claims() -> None:
    good = journal(("test", "a.py::t1", "passed"))
    assert judge(ExitStatus(), Evidence(0, testimony=good)).reward == 1.0
    assert judge(ExitStatus(), Evidence(1, testimony=good)).reward == 0.0
    ended = read_journal(b'[7, "start", "runner"]\n')
    assert ended.fouls == ("ended_interpreter",)
    never = read_journal(b'[7, "start", "runner"]\n[7, "end"]\n')
    for verdict in (ExitStatus(), RewardFile(), NamedTests(("a.py::t1",))):
        assert judge(verdict, Evidence(0, PYTEST, never, {"reward.txt": b"1"})).parts["tampered"] == 1.0
        assert judge(verdict, Evidence(4, PYTEST, never, {"reward.txt": b"1"})).parts == {"unbegun": 1.0}
    assert read_journal(b'[7, "start", ""]\n').fouls == (), "a server that was killed"
    few = journal(("begin", "pytest", 2), ("test", "a.py::t1", "passed"))
    assert few.fouls == ("ended_tests",)
    assert read_journal(b"junk\n").fouls and read_journal(b'[1, "test", "a", {}]\n').fouls
    for verdict in (ExitStatus(), RewardFile(), NamedTests(("a.py::t1",))):
        evidence = Evidence(0, PYTEST, ended, {"reward.txt": b"1"})
        assert judge(verdict, evidence) == judge(ExitStatus(), Evidence(0, testimony=ended))
        assert judge(verdict, evidence).parts == {"tampered": 1.0, "tampered/ended_interpreter": 1.0}
    with pytest.raises(InvalidGrade, match="no test has passed"):
        judge(ExitStatus(), Evidence(0, testimony=journal(("test", "a.py::t1", "skipped"))))
    forged = Evidence(0, "PASSED a.py::t1\n", journal(("test", "a.py::t1", "failed"), exit=1))
    assert judge(NamedTests(("a.py::t1",)), forged).reward == 0.0
    rewritten = Evidence(0, "", journal(("test", "a.py::t1", "failed"), exit=1), {"reward.txt": b"1"})
    assert judge(RewardFile(), rewritten).parts == {"tampered": 1.0}


def journal(*entries: tuple[Any, ...], exit: int = 0) -> Testimony:
    begin = () if any(entry[0] == "begin" for entry in entries) else (("begin", "pytest", len(entries)),)
    lines = [("start", "runner"), *begin, *entries, ("finish", "pytest", exit), ("end",)]
    return read_journal(b"".join(json.dumps([7, *line]).encode() + b"\n" for line in lines))
