"""From what happened in the room to a grade.

Invariant: pure, and pessimistic where sources disagree. A foul of the code under test is the agent's doing: reward 0,
and the grade says "tampered". Where the judge itself failed (nothing was tested, no readable reward, a log that tells
another story than the exit status) there is no grade: `InvalidGrade`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import InvalidGrade
from ..tasks import ExitStatus, NamedTests, RewardFile, TestOutcomes, Verdict
from ..tool_env import Grade
from .reports import Outcome, junit_name, parse_report, worst
from .rewards import read_reward
from .testimony import Testimony


@dataclass(frozen=True)
class Evidence:
    """What the grading command left behind."""

    exit: int
    log: str = ""
    testimony: Testimony = field(default_factory=Testimony)
    rewards: Mapping[str, bytes] = field(default_factory=dict)


def judge(verdict: Verdict, evidence: Evidence) -> Grade:
    if evidence.testimony.fouls:
        return Grade(0.0, {"tampered": 1.0, **{f"tampered/{foul}": 1.0 for foul in evidence.testimony.fouls}})
    if evidence.testimony.unbegun:  # a conftest that cannot be imported, say; with exit status 0 there is no excuse
        return Grade(0.0, {"tampered": 1.0, "tampered/ended_tests": 1.0} if evidence.exit == 0 else {"unbegun": 1.0})
    match verdict:
        case ExitStatus():
            return _exit_status(evidence)
        case RewardFile():
            return _reward_file(evidence)
        case NamedTests():
            return _named_tests(verdict, evidence)
        case TestOutcomes():
            return _test_outcomes(verdict, evidence)


def _exit_status(evidence: Evidence) -> Grade:
    sessions, outcomes = evidence.testimony.sessions, evidence.testimony.outcomes
    if evidence.exit != 0:
        return Grade(0.0)
    if sessions and all(session.exit != 0 for session in sessions):
        raise InvalidGrade("the command ended with 0, but its test runs did not")
    if sessions and "passed" not in outcomes.values():
        raise InvalidGrade("the command ended with 0, but no test has passed")
    return Grade(1.0)


def _reward_file(evidence: Evidence) -> Grade:
    if evidence.exit > 128:
        return Grade(0.0, {"killed": 1.0})  # by whom, if not by the code under test: nobody else was there
    numbers = read_reward(evidence.rewards)
    sessions = evidence.testimony.sessions
    if numbers["reward"] == 1.0 and sessions and all(session.exit != 0 for session in sessions):
        return Grade(0.0, {"tampered": 1.0})
    return Grade(numbers.pop("reward"), numbers)


def _named_tests(verdict: NamedTests, evidence: Evidence) -> Grade:
    if not verdict.fail_to_pass and not verdict.pass_to_pass:
        raise InvalidGrade("the task names no test")
    outcomes = _outcomes(evidence, verdict)
    failing, passing = (_share(names, outcomes) for names in (verdict.fail_to_pass, verdict.pass_to_pass))
    return Grade(float(failing == passing == 1.0), {"fail_to_pass": failing, "pass_to_pass": passing})


def _test_outcomes(verdict: TestOutcomes, evidence: Evidence) -> Grade:
    """R2E-Gym names tests by what follows the file: "TestA.test_b"."""
    found = _outcomes(evidence, NamedTests((), (), "pytest"))
    if not any("::" in name for name in verdict.expected):
        found = worst((".".join(name.split("::")[1:]), outcome) for name, outcome in found.items())
    expected = {name: _OUTCOME.get(outcome.upper(), outcome) for name, outcome in verdict.expected.items()}
    agreeing = sum(found.get(name) == outcome for name, outcome in expected.items())
    return Grade(float(found == expected), {"agreeing": agreeing / max(1, len(expected))})


_OUTCOME: Mapping[str, Outcome] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XFAILED": "xfailed",
    "XPASS": "xpassed",
    "XPASSED": "xpassed",
}


def _outcomes(evidence: Evidence, verdict: NamedTests) -> Mapping[str, Outcome]:
    """What the witness saw; of tests that it knows by another name, what the log says."""
    seen = evidence.testimony.outcomes
    if verdict.report == "junit":
        seen = {junit_name(test): outcome for test, outcome in seen.items()}
    if not evidence.testimony.sessions:
        return parse_report(evidence.log, verdict.report, evidence.exit)
    if not seen:
        raise InvalidGrade("the test run was seen, but no test in it")
    unknown = [name for name in (*verdict.fail_to_pass, *verdict.pass_to_pass) if not _reports(name, seen)]
    if not unknown or verdict.report != "unittest":
        return seen
    told = parse_report(evidence.log, verdict.report, evidence.exit)
    return {**{name: told[name] for name in unknown if name in told}, **seen}


def _share(names: Iterable[str], outcomes: Mapping[str, Outcome]) -> float:
    """1 when there are none."""
    passed = [bool(found) and all(o in ("passed", "xfailed") for o in found) for found in _each(names, outcomes)]
    return sum(passed) / len(passed) if passed else 1.0


def _each(names: Iterable[str], outcomes: Mapping[str, Outcome]) -> Iterable[list[Outcome]]:
    for name in names:
        yield _reports(name, outcomes)


def _reports(name: str, outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """By its whole name, else by the first word of it: SWE-bench cuts "test_a[x y]" off at the space."""
    name = next(iter(worst([(name, "passed")])))
    if name in outcomes:
        return [outcomes[name]]
    return [outcome for test, outcome in outcomes.items() if "[" in name and test.partition(" ")[0] == name]
