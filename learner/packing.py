"""From trajectories to packed micro-batches.

Invariant: a position is an action if and only if the token that follows it was sampled by the engine. Everything the
learner averages, weighs or differentiates has one entry per action and is selected here, from `Trace.sampled` alone;
prompts, tool output and template tokens are context and nothing else. Position p of a trace predicts token p + 1, so
the value "before" a sampled token, its log-probability and its advantage all live at p.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ..buffer import Trajectory

# Sequences at least this fraction of the longest of a group share one padded attention call (see model.CoreAttention).
GROUP_RATIO = 0.7


@dataclass(frozen=True)
class Batch:
    """Episodes laid flat: N positions (traces one after another, an episode's in order), K of which are actions."""

    trajectories: Sequence[Trajectory]
    """The episodes, in order."""
    tokens: np.ndarray
    """int64[N]."""
    starts: np.ndarray
    """int64[traces + 1], where each trace begins among the positions, and the end."""
    episode: np.ndarray
    """int64[traces], the episode each trace belongs to."""
    actions: np.ndarray
    """int64[K], the positions of the actions, in order."""
    targets: np.ndarray
    """int64[K], the token sampled there."""
    mu: np.ndarray
    """float32[K], its log-probability at the engine, in nats."""
    versions: np.ndarray
    """int32[K], the weight version that sampled it."""
    rewards: np.ndarray
    """float64[K], the reward it earned."""
    temperature: np.ndarray
    """float32[K], the temperature it was sampled at."""

    @cached_property
    def action_starts(self) -> np.ndarray:
        """int64[traces + 1], where each trace begins among the actions, and the end."""
        return np.searchsorted(self.actions, self.starts)

    @cached_property
    def boundaries(self) -> np.ndarray:
        """int64[episodes + 1], where each episode begins among the actions, and the end."""
        counts = np.bincount(self.episode, np.diff(self.action_starts), minlength=len(self.trajectories))
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64[episodes], the number of actions of each."""
        return np.diff(self.boundaries)

    @cached_property
    def sequence(self) -> np.ndarray:
        """int64[K], the episode each action belongs to."""
        return np.repeat(np.arange(len(self.trajectories)), self.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64[episodes], the last position of each episode: where a cut-off episode is bootstrapped."""
        last = np.zeros(len(self.trajectories), np.int64)
        last[self.episode] = self.starts[1:] - 1  # the last trace of an episode comes last and wins
        return last


def flatten(trajectories: Sequence[Trajectory]) -> Batch:
    """Lays trajectories out as one Batch.

    A reward at position q of a trace is earned by the last token sampled at or before q; the trajectory's own reward by
    the last one of the episode. Raises ValueError for a trace whose first token counts as sampled (nothing predicts it)
    and for a reward before the first sampled token of its trace.
    """
    traces = [(e, trace) for e, trajectory in enumerate(trajectories) for trace in trajectory.traces]
    starts = np.cumsum([0] + [len(trace.tokens) for _, trace in traces])
    sampled = _concatenate([trace.sampled for _, trace in traces], bool)
    if sampled[starts[:-1]].any():
        raise ValueError("the first token of a trace cannot be a sampled one: nothing predicts it")
    tokens = _concatenate([trace.tokens for _, trace in traces], np.int64)
    chosen = np.flatnonzero(sampled)
    of_episode = np.repeat([e for e, _ in traces], np.diff(starts)).astype(np.int64)[chosen]
    temperatures = [trajectory.sampling.get("temperature", 1.0) for trajectory in trajectories]
    rewards = np.zeros(len(chosen))
    for start, (e, trace) in zip(starts, traces, strict=False):
        for position, value in trace.rewards:
            earner = int(np.searchsorted(chosen, start + position, side="right")) - 1
            if earner < 0 or chosen[earner] < start:
                raise ValueError(f"trajectory {trajectories[e].id}: reward at {position} precedes every sampled token")
            rewards[earner] += value
    for e, trajectory in enumerate(trajectories):
        last = int(np.searchsorted(of_episode, e, side="right")) - 1
        if last >= 0 and of_episode[last] == e:
            rewards[last] += trajectory.reward
    return Batch(
        trajectories=trajectories,
        tokens=tokens,
        starts=starts,
        episode=np.array([e for e, _ in traces], np.int64),
        actions=chosen - 1,
        targets=tokens[chosen],
        mu=_concatenate([trace.logprobs for _, trace in traces], np.float32)[chosen],
        versions=_concatenate([trace.versions for _, trace in traces], np.int32)[chosen],
        rewards=rewards,
        temperature=np.array(temperatures, np.float32)[of_episode],
    )


def outcome(trajectory: Trajectory) -> float:
    """All that an attempt earned."""
    return trajectory.reward + sum(value for trace in trajectory.traces for _, value in trace.rewards)


class Packed(PackedSeqParams):
    """Megatron's description of packed sequences, and what attention on a CPU wants to know besides."""

    positions: torch.Tensor
    """int64[T], each position's place in its own sequence."""
    groups: list[tuple[torch.Tensor, torch.Tensor]]
    """Sequences of similar length: (padded index [n, L] into T, flat index into n * L of the real positions)."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: T packed positions, A of them actions, on the model's device."""

    tokens: torch.Tensor
    """int64[1, T]."""
    packed: Packed
    """Where one sequence ends and the next begins."""
    actions: torch.Tensor
    """int64[A], the positions of the actions among T."""
    targets: torch.Tensor
    """int64[A]."""
    temperature: torch.Tensor
    """float32[A]."""
    columns: Mapping[str, torch.Tensor]
    """float32[A] each: what the loss needs besides, by name."""
    positions: np.ndarray
    """int64[T], where the positions lie in the Batch."""
    which: np.ndarray
    """int64[A], which of the Batch's actions these are."""


def plan(batch: Batch, tokens_per_microbatch: int, episodes: Iterable[int] | None = None) -> list[np.ndarray]:
    """Cuts the traces of `episodes` (all by default) into micro-batches of similar lengths: int64[traces] each.

    A micro-batch holds at most `tokens_per_microbatch` positions unless it is a single trace. There is always at least
    one, maybe of no traces: every rank takes part in every step.
    """
    chosen = np.arange(len(batch.episode))
    if episodes is not None:
        chosen = chosen[np.isin(batch.episode, list(episodes))]
    lengths = np.diff(batch.starts)
    parts: list[list[int]] = [[]]
    room = tokens_per_microbatch
    for trace in sorted(chosen.tolist(), key=lambda index: -lengths[index]):
        if parts[-1] and lengths[trace] > room:
            parts.append([])
            room = tokens_per_microbatch
        parts[-1].append(trace)
        room -= int(lengths[trace])
    return [np.array(part, np.int64) for part in parts]


def gather(batch: Batch, traces: np.ndarray, columns: Mapping[str, np.ndarray], device: torch.device) -> MicroBatch:
    """Packs `traces` (longest first, as `plan` gives them) and their `columns` [K] into one MicroBatch."""
    positions = _ranges(batch.starts[traces], batch.starts[traces + 1])
    which = _ranges(batch.action_starts[traces], batch.action_starts[traces + 1])
    lengths = batch.starts[traces + 1] - batch.starts[traces]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.diff(batch.action_starts)[traces]
    actions = batch.actions[which] + np.repeat(bounds[:-1] - batch.starts[traces], counts)
    tokens = batch.tokens[positions]
    if not len(traces):  # a rank without work runs one position that is nobody's action
        tokens, bounds = np.zeros(1, np.int64), np.array([0, 1])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens=put(tokens)[None],
        packed=_packed(bounds, device),
        actions=put(actions),
        targets=put(batch.targets[which]),
        temperature=put(batch.temperature[which]),
        columns={name: put(column[which].astype(np.float32)) for name, column in columns.items()},
        positions=positions,
        which=which,
    )


def _concatenate(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers of all ranges [start, end), one range after another."""
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)] or [np.zeros(0, np.int64)])


def _packed(bounds: np.ndarray, device: torch.device) -> Packed:
    cumulative = torch.from_numpy(bounds.astype(np.int32)).to(device)
    longest = int(np.diff(bounds).max())
    packed = Packed(
        # On a CPU Megatron's "thd" would rotate and attend one sequence at a time; ours is flat but for attention.
        qkv_format="thd" if device.type == "cuda" else "sbhd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if device.type == "cpu":
        packed.positions = torch.from_numpy(_ranges(np.zeros(len(bounds) - 1, np.int64), np.diff(bounds)))
        packed.groups = _attention_groups(bounds)
    return packed


def _attention_groups(bounds: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    groups = []
    lengths = np.diff(bounds)
    first = 0
    while first < len(lengths):
        end = first + 1
        while end < len(lengths) and GROUP_RATIO * lengths[first] <= lengths[end] <= lengths[first]:
            end += 1
        columns = np.arange(lengths[first])
        index = bounds[first:end, None] + np.minimum(columns, lengths[first:end, None] - 1)
        real = np.flatnonzero(columns < lengths[first:end, None])
        groups.append((torch.from_numpy(index), torch.from_numpy(real)))
        first = end
    return groups
