"""A small model directory, synthetic episodes, and this process as a learner of one rank."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from argosy.buffer import Task, Trace, Trajectory, Turn

CORPUS = [
    "def f(x):\n    return x + 1",
    '<tool_call>\n{"name": "edit", "arguments": {"line": "return x * 3"}}\n</tool_call>',
    "FAIL\nf(1)=2 want 3",
    "PASS",
] * 20


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from argosy.learner.scratch import make_model

    out = tmp_path_factory.mktemp("model")
    return make_model(out, CORPUS, vocab=320, hidden=32, layers=2, heads=4, kv_heads=2, initializer_range=0.1)


@pytest.fixture(scope="session")
def episode() -> Callable[..., Trajectory]:
    return make_episode


def make_episode(
    generator: np.random.Generator,
    name: str = "t",
    length: int = 0,
    vocab: int = 320,
    version: int = 0,
    **changes: object,
) -> Trajectory:
    """An episode of random tokens: a prompt, then turns of sampled tokens and tool output in between."""
    length = length or int(generator.integers(20, 60))
    sampled = np.zeros(length, bool)
    turns, at = [], int(generator.integers(4, 10))
    while at < length:
        end = min(length, at + int(generator.integers(1, 8)))
        sampled[at:end] = True
        turns.append(Turn(at, end, "assistant"))
        at = end + int(generator.integers(1, 8))
    trace = Trace(
        tokens=generator.integers(0, vocab, length),
        sampled=sampled,
        logprobs=np.where(sampled, -generator.random(length) * 3, 0.0),
        versions=np.where(sampled, version, -1),
        turns=turns,
    )
    fields: dict[str, object] = {
        "id": name, "attempt": name + "/0", "task": Task("synthetic/0", "synthetic", 0), "group": name,
        "group_size": 1, "group_index": 0, "env": "synthetic", "status": "terminated",
        "reward": float(generator.integers(0, 2)), "reward_parts": {}, "traces": [trace],
        "sampling": {"temperature": 1.0},
    }  # fmt: skip
    return Trajectory(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """This process as the only rank of a learner."""
    import torch
    from argosy.learner import ranks
    from argosy.learner.settings import ParallelSettings

    torch.set_num_threads(1)
    ranks.start(ParallelSettings(), seed=0)
    yield
    ranks.stop()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """Loads a directory as transformers does: reference(path) -> float32 model."""
    # PyPI's torchvision is built for CUDA; beside a CPU torch its fake operators fail to register.
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
    import torch
    from transformers import AutoModelForCausalLM

    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
