"""Against transformers in float32: the same numbers in, the same numbers out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from argosy.buffer import Trajectory
from argosy.learner.hf_weights import Directory, export_hf
from argosy.learner.model import Architecture, Critic, Policy
from argosy.learner.packing import flatten, gather, plan

VOCAB = 250  # no multiple of 16: padded rows must not matter
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip


def save_model(family: str, tied: bool, out: Path) -> Any:
    import transformers

    config_class = getattr(transformers, family + "Config")
    extra = {"head_dim": 32} if family == "Qwen3" else {}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")(
        config_class(**SIZES, **extra, tie_word_embeddings=tied, rope_parameters=rope)
    ).float()
    for name, parameter in model.named_parameters():  # so that a norm or bias in the wrong place shows
        if "norm" in name or "bias" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(out)
    return model.eval()


@pytest.mark.parametrize(("family", "tied"), [("Qwen3", False), ("Qwen3", True), ("Llama", False), ("Qwen2", True)])
def test_logprobs_entropy_and_weights_agree_with_transformers(
    family: str, tied: bool, tmp_path: Path, alone: None, reference: Any, episode: Callable[..., Trajectory]
) -> None:
    expected = save_model(family, tied, tmp_path)
    policy = Policy(tmp_path)
    generator = np.random.default_rng(0)
    episodes = [
        episode(generator, f"t{i}", length=length, vocab=VOCAB, sampling={"temperature": 0.7 if i % 2 else 1.0})
        for i, length in enumerate([9, 60, 33, 34, 120, 12, 58])
    ]
    batch = flatten(episodes)
    got, entropies = np.zeros(len(batch.actions)), np.zeros(len(batch.actions))
    with torch.no_grad():
        for part in plan(batch, 130):
            microbatch = gather(batch, part, {}, torch.device("cpu"))
            logprobs, entropy = policy(microbatch)
            got[microbatch.which], entropies[microbatch.which] = logprobs.numpy(), entropy.numpy()
        wanted, wanted_entropy = [], []
        for trajectory in episodes:
            trace = trajectory.traces[0]
            tokens = torch.from_numpy(trace.tokens.astype(np.int64))
            logits = expected(tokens[None]).logits[0, :-1].double() / trajectory.sampling["temperature"]
            every = torch.log_softmax(logits, -1)
            sampled = trace.sampled[1:]
            wanted.append(every.gather(1, tokens[1:, None])[sampled, 0].numpy())
            wanted_entropy.append(-(every.exp() * every).sum(-1)[sampled].numpy())
    assert np.abs(got - np.concatenate(wanted)).max() < 1e-4
    assert np.abs(entropies - np.concatenate(wanted_entropy)).max() < 1e-4

    exported, source = dict(export_hf(policy)), Directory(tmp_path)
    assert set(exported) == {name for name in expected.state_dict() if not (tied and name == "lm_head.weight")}
    assert all(torch.equal(tensor, source[name]) for name, tensor in exported.items())


def test_a_critic_starts_from_the_policy_with_value_zero(
    model_dir: Path, alone: None, episode: Callable[..., Trajectory]
) -> None:
    critic, policy = Critic(model_dir), Policy(model_dir)
    batch = flatten([episode(np.random.default_rng(0))])
    values = critic(gather(batch, np.array([0]), {}, torch.device("cpu")))
    assert values.shape == batch.tokens.shape and not values.any()
    trunk = dict(critic.named_parameters())
    assert all(torch.equal(p, trunk[name]) for name, p in policy.named_parameters() if "output_layer" not in name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_model_it_would_compute_wrongly_is_refused(
    change: dict[str, Any], message: str, model_dir: Path, tmp_path: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        Architecture.read(tmp_path)
