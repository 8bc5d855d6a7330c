"""What is read from a run's folder, also from one that has been through something."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from argosy.buffer import Ledger
from argosy.deploy import report
from argosy.deploy.paths import RunPaths, write_whole
from argosy.deploy.progress import Progress, Tail, evaluations, summary
from argosy.deploy.recipe import Recipe, RecipeError, load
from argosy.deploy.supervisor import Supervisor
from redis.connection import parse_url


def learned(paths: RunPaths, *steps: tuple[str, int, str]) -> None:
    """Appends the learner's records of these steps, each with a note of who did it."""
    paths.root.mkdir(parents=True, exist_ok=True)
    with paths.metrics.open("a") as file:
        for stage, step, who in steps:
            record = {"stage": stage, "step": step, "who": who, "time": 0, "seconds": 1, "alarms": []}
            file.write(json.dumps(record | {"staleness_max": 1, "staleness_mean": 0.5}) + "\n")


def evaluated(paths: RunPaths, when: str, source: str, success: float) -> None:
    file = paths.evaluation(when, source)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"episodes": 4, "success": success, "transcripts": []}))


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Recipe, RunPaths]:
    return load("demo", runs=tmp_path / "runs")


def test_only_the_steps_that_the_newest_weights_went_through_count(demo: tuple[Recipe, RunPaths]) -> None:
    _, paths = demo
    learned(paths, ("value", 1, "a"), ("value", 2, "a"), ("policy", 1, "a"), ("policy", 2, "a"), ("policy", 3, "a"))
    progress = Progress(paths)
    progress.update()
    learned(paths, ("policy", 2, "b"))
    progress.update()
    assert [(record["step"], record["who"]) for record in progress.series("policy")] == [(1, "a"), (2, "b")]
    learned(paths, ("value", 2, "c"))
    progress.update()
    assert [(stage, record["who"]) for stage, record in progress.records()] == [("value", "a"), ("value", "c")]


def test_samples_of_undone_steps_are_not_shown(demo: tuple[Recipe, RunPaths]) -> None:
    _, paths = demo
    learned(paths, *(("policy", step, "a") for step in (1, 2, 3)))
    paths.samples.mkdir()
    for step in (1, 2, 25):
        (paths.samples / f"step-{step:06d}.jsonl").touch()
    progress = Progress(paths)
    progress.update()
    assert [file.stem for file in report._samples(progress, paths)] == ["step-000001", "step-000002"]


def test_a_torn_line_is_left_out_and_an_unfinished_one_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \0\0\n\xff\n{"a": 2}\n{"a": ')
    tail = Tail(file)
    assert tail.read() == [{"a": 1}, {"a": 2}]
    with file.open("a") as out:
        out.write("3}\n")
    assert tail.read() == [{"a": 3}]


def test_the_summary_counts_what_was_played_and_measured(demo: tuple[Recipe, RunPaths]) -> None:
    recipe, paths = demo
    learned(paths, ("policy", 1, "a"))
    for when, success in (("before", 0.25), ("after", 0.75)):
        evaluated(paths, when, "unseen", success)
        evaluated(paths, when, "of-an-older-recipe", 0.0)
    progress = Progress(paths)
    progress.update()
    dropped = {"stale": 3, "env_failed": 5, "poisoned": 7}
    progress.ledger = Ledger(100, 60, dropped, {"queued": 11, "leased": 9, "ready": 5}, {})
    numbers: dict[str, Any] = summary(progress, paths, recipe)
    assert numbers["episodes"] == 60 + 3 + 5
    assert (numbers["success_before"], numbers["success_after"]) == (0.25, 0.75)
    assert [one["source"] for one in evaluations(paths, "after", recipe.evaluation)] == ["unseen"]


def test_what_is_measured_cannot_change_between_before_and_after(demo: tuple[Recipe, RunPaths], tmp_path: Path) -> None:
    recipe, paths = demo
    paths.root.mkdir(parents=True)
    write_whole(paths.recipe, json.dumps(recipe.model_dump(mode="json")))
    evaluated(paths, "before", "unseen", 0.0)
    changed, _ = load("demo", ["evaluation.0.episodes=8"], runs=tmp_path / "runs")

    async def watch(_: Supervisor) -> None:
        raise AssertionError("it must not begin")

    with pytest.raises(RecipeError, match=r"was begun with evaluation .*'episodes': 256.*--fresh"):
        asyncio.run(Supervisor(changed, paths, watch).run())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_whole(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new \ud800")
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new"


@pytest.mark.parametrize("name", ["with space", "50%25", "a#b", "who?"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / name)
    assert parse_url(paths.redis_url)["path"] == str(paths.redis_socket)
