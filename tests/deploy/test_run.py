"""The main job, shortened, on the real stack: it learns, is interrupted, loses processes, and loses nothing."""

import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import SMALL, Train, processes_about

STEPS = 70
TRACES_OF_A_RUN = ("argosy-engine-*", "argosy-*.sock")


def leftovers() -> set[object]:
    """What a run could leave outside its folder: sockets, temporary folders, shared memory, sandboxes."""
    found = {path for pattern in TRACES_OF_A_RUN for path in Path(tempfile.gettempdir()).glob(pattern)}
    return found | set(Path("/dev/shm").iterdir()) | set(processes_about("from guest.main import main"))


@pytest.fixture(scope="module")
def survivor(workplace: Path) -> Iterator[Train]:
    """A run that was interrupted once, and then lost its actor, engine, learner and Redis to kill -9, one by one."""
    before = leftovers()
    run = Train(workplace, "survivor", [*SMALL, f"learner.stop.steps={STEPS}", "learner.stop.success=null"])
    run.start()
    run.until("the first policy steps", lambda: len(run.steps()) >= 5, 400)
    run.interrupt()
    begun = time.monotonic()
    assert run.end(30) == 130
    run.seconds_to_drain = time.monotonic() - begun  # type: ignore[attr-defined]
    run.left_behind = (run.processes(), leftovers() - before)  # type: ignore[attr-defined]
    run.ledger_between = run.ledger()  # type: ignore[attr-defined]

    run.start()
    for victim, *parts in (
        ("actor-0", "argosy.actors worker"),
        ("engine-0", "argosy.actors.sglang_launch"),
        ("learner", "argosy.learner"),
        ("redis", "redis-server"),
    ):
        done = len(run.steps())
        run.until("more steps", lambda done=done: len(run.steps()) >= done + 3, 200)  # type: ignore[misc]
        run.kill(*parts)
        run.until(f"{victim} is started again", lambda victim=victim: run.restarted(victim), 30)  # type: ignore[misc]
    assert run.end(400) == 0, run.output()
    run.left_at_the_end = (run.processes(), leftovers() - before)  # type: ignore[attr-defined]
    yield run


@pytest.mark.timeout(900)
def test_it_learns(survivor: Train) -> None:
    summary = json.loads((survivor.root / "summary.json").read_text())
    assert summary["success_after"] > summary["success_before"] + 0.15, summary
    assert summary["rl_steps"] == STEPS
    assert summary["restarts"] == 4
    for key in ("rl_seconds", "episodes", "engine_tokens", "learner_tokens"):
        assert summary[key] > 0, key


def test_it_was_interrupted_within_ten_seconds_and_left_nothing_behind(survivor: Train) -> None:
    assert survivor.seconds_to_drain < 10  # type: ignore[attr-defined]
    assert survivor.left_behind == ({}, set())  # type: ignore[attr-defined]
    assert survivor.left_at_the_end == ({}, set())  # type: ignore[attr-defined]


def test_it_went_on_where_it_stopped(survivor: Train) -> None:
    stages = [note.get("stage") for note in survivor.lines("journal.jsonl") if note["event"] == "stage"]
    assert stages.count("evaluation before") == 1
    supervised = [record["step"] for record in survivor.lines("metrics.jsonl") if record["stage"] == "supervised"]
    assert supervised == sorted(set(supervised)), "the supervised stage was done again"


@pytest.mark.parametrize("when", ["between", "after"])
def test_nothing_is_lost(survivor: Train, when: str) -> None:
    ledger = survivor.ledger_between if when == "between" else survivor.ledger()  # type: ignore[attr-defined]
    assert ledger["balanced"] and ledger["lost"] == 0
    assert ledger["created"] == ledger["trained"] + sum(ledger["dropped"].values()) + sum(ledger["live"].values())
    assert set(ledger["dropped"]) <= {"stale"} or not any(n for k, n in ledger["dropped"].items() if k != "stale")


def test_each_trained_attempt_was_trained_in_one_step_of_the_surviving_lineage(survivor: Train) -> None:
    batches = 4 + STEPS  # value and policy, 32 attempts each
    assert survivor.ledger()["trained"] == 32 * batches


def test_staleness_stays_within_its_bound(survivor: Train) -> None:
    ages = [record["staleness_max"] for record in survivor.steps()]
    assert 0 < max(ages) <= 4


def test_versions_only_grow(survivor: Train) -> None:
    versions = [record["version"] for record in survivor.lines("metrics.jsonl") if record["stage"] == "policy"]
    assert versions == sorted(set(versions))


def test_engine_and_learner_agree_after_every_update(survivor: Train) -> None:
    """On tokens sampled by the very weights the learner holds, in float32, through all restarts."""
    errors = [record["engine_error"] for record in survivor.steps() if record["engine_error"] is not None]
    assert len(errors) > STEPS / 4
    assert max(errors) < 1e-4


def test_the_critic_explains_something(survivor: Train) -> None:
    explained = [
        record["explained_variance"] for record in survivor.steps() if record["explained_variance"] is not None
    ]
    assert sum(explained) / len(explained) > 0.01


def test_the_report_is_one_file_that_shows_both_ends(survivor: Train) -> None:
    page = (survivor.root / "report.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["summary"]["lost"] == 0
    assert len(data["curves"][0]["points"]) == STEPS
    for when in ("before", "after"):
        tokens = [token for one in data["transcripts"][when] for window in one["windows"] for token in window]
        assert {"sampled", "tool", "template", "user"} <= {writer for _, writer, *_ in tokens}
        assert all((token[3] is not None) == (token[1] == "sampled") for token in tokens)


def test_a_finished_run_is_shown_again_and_not_done_again(survivor: Train) -> None:
    begun = time.monotonic()
    survivor.start()
    assert survivor.end(30) == 0
    assert time.monotonic() - begun < 10
    assert "This run is finished" in survivor.output()


@pytest.mark.timeout(600)
def test_two_runs_side_by_side_do_not_disturb_each_other(survivor: Train, workplace: Path) -> None:
    """One is synchronous (eta = 0), the other has two actors and a learner of two ranks.

    Both begin with the model of an earlier run instead of a cold start.
    """
    model = str(sorted((survivor.root / "weights").iterdir())[-1])
    warm = [f"model={{path: {model!r}}}", "demonstrations=0", "learner.supervised=null", "evaluation=[]"]
    warm += ["learner.value.batches=1", "learner.stop.steps=4", "actor.concurrency=16"]
    several = "processes={actors: 2, learners: 2}"
    runs = [Train(workplace, "synchronous", [*warm, "buffer.eta=0"]), Train(workplace, "beside", [*warm, several])]
    before = leftovers()
    for run in runs:
        run.start()
    for run in runs:
        assert run.end(300) == 0, run.output()
        ledger = run.ledger()
        assert ledger["balanced"] and ledger["trained"] == 32 * 5
        assert max(record["engine_error"] or 0 for record in run.steps()) < 1e-4
        assert run.processes() == {}
    assert leftovers() - before == set()
    assert {record["staleness_max"] for record in runs[0].steps()} == {0}


@pytest.mark.timeout(300)
def test_a_second_interrupt_stops_at_once(workplace: Path) -> None:
    before = leftovers()
    run = Train(workplace, "impatient", SMALL)
    run.start()
    run.until("its processes run", lambda: any("redis-server" in command for command in run.processes().values()), 60)
    run.interrupt()
    time.sleep(0.05)
    begun = time.monotonic()
    run.interrupt()
    assert run.end(10) in (130, -signal.SIGINT)  # the latter if all had ended just before
    assert time.monotonic() - begun < 2
    time.sleep(1)  # for the kernel to end what lost its parent
    assert run.processes() == {}
    assert leftovers() - before == set()


@pytest.mark.timeout(300)
def test_nothing_outlives_a_supervisor_that_was_killed(workplace: Path) -> None:
    before = leftovers()
    run = Train(workplace, "orphans", SMALL)
    run.start()
    run.until("its processes run", lambda: any("demonstrate" in command for command in run.processes().values()), 90)
    assert run.process is not None
    run.process.kill()
    run.process.wait(10)
    deadline = time.monotonic() + 15
    while run.processes() or leftovers() - before:
        assert time.monotonic() < deadline, (run.processes(), leftovers() - before)
        time.sleep(0.2)


@pytest.mark.timeout(120)
def test_one_supervisor_at_a_time(workplace: Path) -> None:
    run = Train(workplace, "twice", SMALL)
    run.start()
    run.until("it has begun", (run.root / "journal.jsonl").exists, 60)
    second = Train(workplace, "twice", SMALL)
    second.start()
    assert second.end(30) == 1
    assert "run 'twice' is already running" in second.output()
    run.interrupt()
    assert run.end(20) == 130
