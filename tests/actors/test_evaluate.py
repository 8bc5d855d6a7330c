"""Evaluation on the real engine, and demonstrations by a scripted expert."""

import asyncio
import json

import numpy as np
import pytest
from argosy.actors.chat import Chat
from argosy.actors.demonstrate import demonstrate
from argosy.actors.errors import ActorError
from argosy.actors.evaluate import find_source
from argosy.buffer import BufferSettings, ReplayBuffer, read_archive


def test_an_evaluation_plays_fixed_seeds_and_leaves_the_buffer_alone(config, start, tmp_path):
    process = start("evaluate", config, "--source", "guess", "--episodes", "6", "--out", str(tmp_path / "e.json"))
    assert process.wait(60) == 0, str(process)
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["episodes"] == 6 and 0 <= result["success"] <= 1 and result["turns"] >= 1
    assert [t["task"] for t in result["transcripts"]] == [f"guess/{seed}" for seed in range(6)]
    (trace,) = result["transcripts"][0]["traces"]
    assert len(trace["tokens"]) == len(trace["sampled"]) == len(trace["versions"])
    assert ReplayBuffer(config.buffer).ledger().created == 0
    with pytest.raises(ActorError, match="no source 'gess'"):
        find_source(config, "gess")


def test_demonstrations_are_what_the_model_would_have_written(engine_config, start, tmp_path):
    """They need neither Redis nor an engine: nothing listens at this run's address."""
    nowhere = BufferSettings(run="none", url=f"unix://{tmp_path}/nothing.sock", batch_size=1)
    sources = ({"name": "guess", "env": "arena:Guess"},)
    config = engine_config.model_validate(
        engine_config.model_dump() | {"buffer": nowhere, "sources": sources, "run_dir": tmp_path}
    )
    process = start("demonstrate", config, "--episodes", "20", "--out", str(tmp_path / "demonstrations"))
    assert process.wait(30) == 0, str(process)
    trajectories = [archived.trajectory for archived in read_archive(tmp_path / "demonstrations")]
    assert [trajectory.task.seed for trajectory in trajectories] == list(range(20))
    chat = Chat(config.model)
    for trajectory in trajectories:
        assert trajectory.reward == 1.0 and trajectory.status == "terminated"  # halving finds it in four turns
        (trace,) = trajectory.traces
        assert not trace.logprobs.any() and set(trace.versions[trace.sampled]) == {0}
        said = [trace.tokens[turn.start : turn.end] for turn in trace.turns if turn.role == "assistant"]
        assert np.array_equal(np.concatenate(said), trace.tokens[trace.sampled])
        for ids in said:
            text = chat.decode(ids.tolist())
            assert text.startswith("<tool_call>") and text.endswith("</tool_call><|im_end|>")
    assert not list(tmp_path.glob(".*"))
    again = asyncio.run(demonstrate(config, 5))
    assert [t.traces[0].tokens.tolist() for t in again] == [t.traces[0].tokens.tolist() for t in trajectories[:5]]


def test_a_failing_environment_ends_demonstrations_with_its_reason(engine_config, start, tmp_path):
    source = {"name": "guess", "env": "arena:Broken", "kwargs": {"kind": "infrastructure"}}
    config = engine_config.model_validate(engine_config.model_dump() | {"sources": (source,), "run_dir": tmp_path})
    process = start("demonstrate", config, "--episodes", "3", "--out", str(tmp_path / "demonstrations"))
    assert process.wait(30) == 1
    assert str(process).splitlines()[-1].endswith("the sandbox is gone") and "Traceback" not in str(process)
    assert not (tmp_path / "demonstrations").exists()
