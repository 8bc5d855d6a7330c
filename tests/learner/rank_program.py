"""What test_parallel runs on every rank, for several layouts in one process because starting one costs seconds.

    RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. python rank_program.py MODEL ARCHIVE OUT LAYOUT [LAYOUT ...]

A layout is like tensor2, pipeline2 or data2: the first rank writes OUT/LAYOUT/records.json, weights and a checkpoint.
resume:LAYOUT continues that checkpoint with tensor parallelism and writes OUT/resumed.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from argosy.buffer import read_archive
from argosy.learner import checkpoint, critic, metrics, policy, publish, ranks
from argosy.learner.estimates import estimate
from argosy.learner.model import Critic, Policy
from argosy.learner.optimization import Trainee
from argosy.learner.packing import flatten
from argosy.learner.settings import LearnerSettings, OptimizerSettings, ParallelSettings, StopSettings
from megatron.core import parallel_state

STEPS = 3
SETTINGS = LearnerSettings(
    stop=StopSettings(steps=STEPS),
    objective={"low": 0.99, "high": 100.0, "entropy": 0.01},
    advantage={"whiten": True},
    tokens_per_microbatch=90,
)
MIXED = LearnerSettings(
    stop=StopSettings(steps=STEPS),
    advantage={"name": "grpo"},
    objective={"name": "gspo", "low": 0.9, "high": 100.0},
    correction={"name": "sequence-tis"},
    per_source={
        "long": {
            "advantage": {"lambda_policy": 0.9, "whiten": True},
            "objective": {"name": "ppo", "dual": 5.0},
            "correction": {"name": "tis"},
        }
    },
    minibatches=2,
    tokens_per_microbatch=90,
)


def build(model: Path) -> dict[str, Trainee]:
    return {
        "policy": Trainee(Policy(model), OptimizerSettings(lr=1e-2, clip=0.5)),
        "critic": Trainee(Critic(model), OptimizerSettings(lr=1e-2, clip=0.5)),
    }


def step(trainees: dict[str, Trainee], archive: Path) -> dict[str, float | None]:
    batch = flatten(ranks.shard([archived.trajectory for archived in read_archive(archive)]))
    judged = critic.learn(trainees["critic"], batch, SETTINGS, updates=2)
    learned = estimate(batch, judged.values, SETTINGS)
    improved = policy.improve(trainees["policy"], batch, learned, SETTINGS)
    mixed = policy.improve(trainees["policy"], batch, estimate(batch, judged.values, MIXED), MIXED)
    found = {**metrics.contents(batch), **metrics.staleness(batch, lambda version: 3 - version)}
    kinds, *ages = (found.pop(name) for name in ("tokens_by_kind", "staleness_episodes", "staleness_tokens"))
    return {
        **found,
        **kinds,
        **{f"age_{place}_{age}": count for place, counts in enumerate(ages) for age, count in enumerate(counts)},
        "zero_variance_groups": metrics.zero_variance_groups(batch),
        **{f"mixed_loss_{part}": update.loss for part, update in enumerate(mixed.updates)},
        **{f"mixed_norm_{part}": update.grad_norm for part, update in enumerate(mixed.updates)},
        "loss": improved.updates[0].loss,
        "grad_norm": improved.updates[0].grad_norm,
        "critic_loss": judged.updates[1].loss,
        "critic_grad_norm": judged.updates[1].grad_norm,
        "explained_variance": metrics.explained_variance(judged.values[batch.actions], learned.returns),
        "spread": learned.spread,
        **improved.diagnostics,
    }


def run(model: Path, archive: Path, out: Path, layout: str) -> None:
    trainees = build(model)
    records = [step(trainees, archive) for _ in range(STEPS)]
    checkpoint.save(out / layout, STEPS, trainees, {"layout": layout})
    records.append(step(trainees, archive))  # what a run resumed from the checkpoint must repeat
    publish.write(trainees["policy"].model, model, out / layout / "weights")
    if ranks.is_first():
        (out / layout / "records.json").write_text(json.dumps(records))


def resume(model: Path, archive: Path, out: Path, layout: str) -> None:
    """Continues another layout's run with tensor parallelism."""
    trainees = build(model)
    folder = checkpoint.newest(out / layout)
    assert folder is not None and checkpoint.load(folder, trainees) == {"layout": layout}
    record = step(trainees, archive)
    if ranks.is_first():
        (out / "resumed.json").write_text(json.dumps(record))


def main() -> None:
    model, archive, out = map(Path, sys.argv[1:4])
    torch.set_num_threads(1)
    for layout in sys.argv[4:]:
        kind = "tensor2" if layout.startswith("resume") else layout
        sizes = {} if kind.startswith("data") else {kind[:-1]: int(kind[-1])}
        if dist.is_initialized():
            ranks.divide(ParallelSettings(**sizes), seed=0)
        else:
            ranks.start(ParallelSettings(**sizes), seed=0)
        if layout.startswith("resume:"):
            resume(model, archive, out, layout.removeprefix("resume:"))
        else:
            run(model, archive, out, layout)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
