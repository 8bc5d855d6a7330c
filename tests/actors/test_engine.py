"""The client and the server against a real SGLang: what was sampled, under which weights, and what is refused."""

import asyncio
import json
import shutil
import time
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from argosy.actors import sglang_cpu
from argosy.actors.chat import Chat
from argosy.actors.engine import Engine, Generation
from argosy.actors.episode import UNUSABLE
from argosy.actors.errors import EngineRefused, EngineUnavailable, OutOfTime
from argosy.actors.settings import ActorConfig
from argosy.buffer import WeightLedger, WeightVersion
from conftest import Process, wait_until
from safetensors.numpy import load_file, save_file

LONG = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture
def ledger(engine: Process, engine_config: ActorConfig) -> WeightLedger:
    return WeightLedger(engine_config.buffer)


def perturbed(model: Path, out: Path, seed: int) -> Path:
    """Other weights of the same shape."""
    shutil.copytree(model, out)
    rng = np.random.default_rng(seed)
    tensors = load_file(model / "model.safetensors")
    noisy = {name: t + 0.05 * rng.standard_normal(t.shape, np.float32) for name, t in tensors.items()}
    save_file(noisy, out / "model.safetensors", metadata={"format": "pt"})
    return out


def next_version(ledger: WeightLedger) -> int:
    latest = ledger.latest()
    return latest.version + 1 if latest else 1


def publish(ledger: WeightLedger, path: Path) -> int:
    version = next_version(ledger)
    ledger.publish(WeightVersion(version, str(path), step=version, checksum="", created=time.time()))
    return version


def with_engine(ledger: WeightLedger, chat: Chat, work, patience: float = 20):
    async def run():
        async with Engine(ledger, chat.vocab_size, patience) as engine:
            return await work(engine)

    return asyncio.run(run())


def reference_logprobs(model: Path, ids: list[int], temperature: float) -> np.ndarray:
    """log_softmax(logits / T) of each token after the first, from Hugging Face's own forward pass."""
    sglang_cpu.install()  # for transformers' import of torchvision
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.timeout(120)
def test_each_token_is_labelled_with_the_weights_that_sampled_it(ledger, engine_config, chat, tmp_path):
    """New weights arrive three times while long generations run; labels and log-probabilities agree throughout."""
    record = ledger.engines()[engine_config.name]
    latest = ledger.latest()
    folders = {record.version: Path(latest.path) if latest else engine_config.model}
    prompt = chat.encode("Guess the number.")
    sampling = LONG | {"temperature": 0.7}
    latencies = []

    async def work(engine: Engine) -> list[Generation]:
        running = [asyncio.create_task(engine.generate(prompt, sampling, f"v{i}/0")) for i in range(8)]
        for seed in range(3):
            await asyncio.sleep(0.4)
            folder = perturbed(engine_config.model, tmp_path / f"w{seed}", seed)
            started = time.monotonic()
            version = publish(ledger, folder)
            assert await asyncio.to_thread(ledger.wait_confirmed, version, 20) == []
            latencies.append(time.monotonic() - started)
            folders[version] = folder
        return await asyncio.gather(*running)

    generations = with_engine(ledger, chat, work)
    print("publication to confirmation:", [f"{1000 * latency:.0f} ms" for latency in latencies])
    labels = Counter(version for generation in generations for version in generation.versions)
    assert len(labels) >= 3, f"the updates missed the generations: {labels}"
    expected = {}
    for generation in generations:
        assert len(generation.ids) == sampling["max_new_tokens"] and generation.finish == "length"
        assert list(generation.versions) == sorted(generation.versions)
        for version in set(generation.versions):
            at = np.flatnonzero(np.array(generation.versions) == version)
            expected = reference_logprobs(folders[version], [*prompt, *generation.ids], 0.7)[len(prompt) - 1 :]
            np.testing.assert_allclose(np.array(generation.logprobs)[at], expected[at], atol=1e-3)


def test_weights_that_cannot_be_loaded_leave_the_old_ones_in_place(ledger, engine, engine_config, chat, tmp_path):
    good = publish(ledger, perturbed(engine_config.model, tmp_path / "good", 10))
    assert ledger.wait_confirmed(good, 20) == []
    broken = {name: perturbed(engine_config.model, tmp_path / name, 11) for name in ("short", "shape", "names")}
    file = broken["short"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    tensors = load_file(broken["shape"] / "model.safetensors")
    save_file(tensors | {"model.norm.weight": np.ones(7, np.float32)}, broken["shape"] / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, broken["names"] / "model.safetensors")
    for folder in (tmp_path / "missing", *broken.values()):
        version = publish(ledger, folder)
        wait_until(lambda v=version: f"version {v} is not loaded, {good} stays" in str(engine), 10, engine)
    prompt = chat.encode("It is below 10.")
    generation = with_engine(ledger, chat, lambda e: e.generate(prompt, LONG | {"max_new_tokens": 20}, "bad/0"))
    assert set(generation.versions) == {good}
    expected = reference_logprobs(tmp_path / "good", [*prompt, *generation.ids], 1.0)[len(prompt) - 1 :]
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-3)
    newer = publish(ledger, perturbed(engine_config.model, tmp_path / "newer", 12))
    assert ledger.wait_confirmed(newer, 20) == []


def test_a_deadline_aborts_the_request_in_the_engine(ledger, engine_config, chat):
    """Aborting one request leaves its neighbours alone, also one whose id begins alike."""

    async def work(engine: Engine) -> Generation:
        neighbour = asyncio.create_task(engine.generate([5], LONG | {"max_new_tokens": 900}, "long/1"))
        await asyncio.sleep(0.3)
        with pytest.raises(OutOfTime, match="long/0"):
            await engine.generate([5], LONG | {"max_new_tokens": 900}, "long/0", seconds=0.3)
        url = ledger.engines()[engine_config.name].url
        await asyncio.to_thread(wait_until, lambda: running(url) == 1, 1, "the aborted request still runs")
        assert not neighbour.done()
        return await neighbour

    assert len(with_engine(ledger, chat, work).ids) == 900


def running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=10) as answer:
        return json.load(answer)["loads"][0]["num_running_reqs"]


def test_what_would_kill_the_engine_is_never_sent(ledger, chat):
    async def work(engine: Engine) -> Generation:
        for ids in ([], [chat.vocab_size], [3, -1]):
            with pytest.raises(EngineRefused, match="token ids must be in"):
                await engine.generate(ids, LONG, "odd/0")
        with pytest.raises(EngineRefused, match="refused"):  # longer than the context: the engine says so, and lives
            await engine.generate([3] * 5000, LONG, "odd/1")
        return await engine.generate([chat.vocab_size - 1], LONG | {"max_new_tokens": 4}, "odd/2")

    assert len(with_engine(ledger, chat, work).ids) == 4


def test_an_episode_uses_all_of_a_context_that_the_engine_does(ledger, chat, model):
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    full = [3] * (context - UNUSABLE)
    few = LONG | {"max_new_tokens": 5}
    assert len(with_engine(ledger, chat, lambda e: e.generate(full, few, "full/0")).ids) == 5
    with pytest.raises(EngineRefused):
        with_engine(ledger, chat, lambda e: e.generate([*full, 3], few, "full/1"))


def test_a_second_turn_finds_the_first_in_the_prefix_cache(ledger, chat):
    async def work(engine: Engine) -> tuple[int, int]:
        prompt = [*chat.encode("It is below 10."), *range(20, 120)]
        first = await engine.generate(prompt, LONG | {"max_new_tokens": 30}, "cache/0")
        second = await engine.generate([*prompt, *first.ids, 7, 8], LONG | {"max_new_tokens": 5}, "cache/1")
        assert first.prefilled == len(prompt)
        return second.prefilled, len(prompt)

    prefilled, length = with_engine(ledger, chat, work)
    assert prefilled <= 4 < length


def test_without_an_engine_the_client_gives_up_at_its_deadline(run_name, engine_config, chat):
    ledger = WeightLedger(engine_config.buffer.model_copy(update={"run": run_name}))
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"no engine answered for 1 s \(none is registered\)"):
        with_engine(ledger, chat, lambda e: e.generate([5], LONG, "none/0"), patience=1)
    assert time.monotonic() - started < 3
    ledger.register_engine("dead", "http://127.0.0.1:9", ttl=60)
    with pytest.raises(EngineUnavailable, match="dead"):
        with_engine(ledger, chat, lambda e: e.generate([5], LONG, "none/1"), patience=1)
