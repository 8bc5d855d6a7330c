"""Many episodes at a time in one process: `python -m argosy.actors worker CONFIG.json`.

Invariant: an attempt that was leased here is completed, failed, released, or lost to another worker, and its episode is
not forgotten before Redis has acknowledged which. A finished trajectory is kept until then, through restarts of Redis.
Failures that are not the agent's give the attempt back with the reason; they are never scored. An unfinished episode is
in the buffer as of its last turn (or of `checkpoint_seconds` ago); whoever has the attempt next goes on from there.

The loop waits for one of its episodes to end, for the buffer (which wakes it when there may be work), or for SIGTERM,
after which running episodes have `drain_seconds` to finish. The buffer is synchronous: its calls run in threads, one
for each that may have to wait for Redis, so that heartbeats go on while all else waits for a Redis that is full.
"""

import asyncio
import json
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from ..buffer import Lease, RedisUnavailable, ReplayBuffer, Trajectory, WeightLedger
from ..envs import InfrastructureError, close_shared_pools, make_env
from .chat import Chat
from .engine import Engine
from .episode import Outcome, engine_policy, run_episode
from .errors import CannotContinue, EngineUnavailable, LeaseLost, TooManyFailures
from .settings import ActorConfig, Mixture
from .unfinished import Unfinished

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long to wait for the buffer's wake-up before looking again
REPORT_SECONDS = 1.0
RATE_SECONDS = 5.0  # episodes per second are counted over so long
REDIS_SECONDS = 5.0  # patience of one call; the worker itself waits for Redis as long as it takes
LONGEST_PAUSE_SECONDS = 5.0  # after failures in a row, which double the pause
FAILURES_IN_A_ROW = 100
STOP_SECONDS = 10.0  # for an environment to give back what it holds

T = TypeVar("T")


@dataclass
class Counters:
    """What the process has done so far; a line of it every second in actors/NAME.jsonl."""

    episodes: int = 0
    sampled_tokens: int = 0
    engine_tokens: int = 0
    """Tokens that engines computed for us: prompts without what their prefix cache held, and samples."""
    failed: int = 0
    released: int = 0
    late: int = 0
    """Episodes whose lease was lost: another worker has them, or they are dropped."""
    resumed: int = 0
    """Episodes that went on from where an earlier try had left them."""
    segments: int = 0
    """Parts of episodes that came home before their end."""
    failures_in_a_row: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=128))
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=2000))  # more than RATE_SECONDS ever see

    def count_tokens(self, trajectory: Trajectory) -> None:
        self.sampled_tokens += trajectory.n_sampled
        self.engine_tokens += trajectory.n_sampled

    def count(self, outcome: Outcome, trajectory: Trajectory) -> None:
        self.failures_in_a_row = 0
        self.episodes += 1
        self.count_tokens(trajectory)
        self.engine_tokens += outcome.prefilled
        self.rewards.append(outcome.reward)
        self.ends.append(time.monotonic())

    def line(self, running: int) -> dict[str, Any]:
        recent = [end for end in self.ends if end > time.monotonic() - RATE_SECONDS]
        return {
            "time": time.time(),
            "episodes": self.episodes,
            "running": running,
            "success": sum(self.rewards) / len(self.rewards) if self.rewards else None,
            "episodes_per_second": len(recent) / RATE_SECONDS,
            "sampled_tokens": self.sampled_tokens,
            "engine_tokens": self.engine_tokens,
            "failed": self.failed,
            "released": self.released,
            "late": self.late,
            "resumed": self.resumed,
            "segments": self.segments,
        }


@dataclass
class Slot:
    """An episode in the works."""

    lease: Lease
    episode: Unfinished | None = None
    saved: float = 0.0
    """When it was last stored."""
    lost: bool = False
    """Somebody else holds the attempt by now."""
    finished: bool = False
    """Played and graded; what is left is to hand it in, which nothing may interrupt."""


class Worker:
    def __init__(self, config: ActorConfig) -> None:
        self.name = config.name
        self._config = config
        self._settings = config.actor
        impatient = config.buffer.model_copy(update={"patience_seconds": REDIS_SECONDS})
        self._buffer = ReplayBuffer(impatient)
        # No call queues behind another: each episode has one at a time, and so have leasing, listening and heartbeats.
        self._threads = ThreadPoolExecutor(self._settings.concurrency + 3)
        self._mixture = Mixture(config.sources)
        for source in config.sources:  # an environment that does not exist is noticed before any work is leased
            make_env(source.env, **source.kwargs)
        self._chat = Chat(config.model)
        self._engine = Engine(WeightLedger(impatient), self._chat.vocab_size, self._settings.patience_seconds)
        self._episodes: dict[asyncio.Task[None], Slot] = {}
        self._listening: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._give_up_at = float("inf")
        self.counters = Counters()

    def stop(self) -> None:
        """Begins the drain; `run` returns within about `drain_seconds`."""
        if not self._stopping:
            self._stopping = True
            self._give_up_at = time.monotonic() + self._settings.drain_seconds
            self._wake.set()

    async def run(self) -> None:
        async with self._engine:
            # What an earlier process of this name held need not wait for its leases to expire.
            await self._redis(self._buffer.abandon, self.name)
            helpers = [asyncio.create_task(self._heartbeat()), asyncio.create_task(self._report())]
            for helper in helpers:
                helper.add_done_callback(lambda _: self._wake.set())
            try:
                while not self._stopping:
                    for helper in helpers:
                        if helper.done():
                            helper.result()  # neither returns, so this raises what ended it
                    if self.counters.failures_in_a_row >= FAILURES_IN_A_ROW:
                        raise TooManyFailures(f"{FAILURES_IN_A_ROW} episodes in a row failed; see the log above")
                    await self._start_episodes()
                    await self._wake.wait()
                    self._wake.clear()
            finally:
                self.stop()
                await self._drain()
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
                self._threads.shutdown()  # nobody is left to call
                self._write_report()
                await close_shared_pools()

    async def _start_episodes(self) -> None:
        """One step after the other: what was leased is at work before a later step may have to be repeated."""
        missing = self._settings.concurrency - len(self._episodes)
        missing -= await self._lease(missing)
        groups = -(-missing // self._config.buffer.group_size)
        if missing and await self._redis(self._buffer.put_tasks, self._mixture, groups):
            missing -= await self._lease(missing)
        if missing and (self._listening is None or self._listening.done()):
            self._listening = asyncio.create_task(self._listen())

    async def _lease(self, n: int) -> int:
        """Begins up to `n` episodes; returns how many."""
        token = uuid4().hex  # of all tries of the call: should an answer get lost, the next one is the same
        leases = await self._redis(self._buffer.lease, self.name, n, token)
        for lease in leases:
            slot = Slot(lease)
            episode = asyncio.create_task(self._attempt(slot))
            self._episodes[episode] = slot
            episode.add_done_callback(self._ended)
        return len(leases)

    async def _listen(self) -> None:
        await self._redis(self._buffer.wait, IDLE_SECONDS)
        self._wake.set()

    def _ended(self, episode: asyncio.Task[None]) -> None:
        slot = self._episodes.pop(episode)
        self._wake.set()
        if not episode.cancelled() and (error := episode.exception()):
            log.error("attempt %s is left to expire", slot.lease.attempt, exc_info=error)

    async def _attempt(self, slot: Slot) -> None:
        """One attempt from its lease to the buffer's acknowledgement."""
        lease = slot.lease
        try:
            await self._play(slot)
        except asyncio.CancelledError:
            if slot.lost:
                self.counters.late += 1
            else:  # we are draining
                await self._release(lease)
        except LeaseLost:
            self.counters.late += 1
        except EngineUnavailable as error:
            log.warning("attempt %s is given back: %s", lease.attempt, error)
            await self._release(lease)
        except InfrastructureError as error:
            await self._fail(lease, type(error).__name__, str(error))
        except Exception as error:  # a bug in an environment must not take the other episodes with it
            log.error("attempt %s failed in %s", lease.attempt, lease.task.id, exc_info=error)
            await self._fail(lease, type(error).__name__, str(error))

    async def _play(self, slot: Slot) -> None:
        lease = slot.lease
        source = self._mixture.sources[lease.task.source]
        env = make_env(source.env, **source.kwargs)
        policy = engine_policy(self._engine, self._chat, self._settings, lease.attempt)
        episode = slot.episode = Unfinished(lease, env, self._chat, source, self._settings, self.name)

        async def save(outcome: Outcome) -> None:
            await self._save(slot, episode, outcome)

        try:
            so_far = await self._resume(lease, episode) if lease.partial else None
            slot.saved = time.monotonic()
            outcome = await run_episode(env, lease.task.seed, policy, episode.transcript, self._settings, save, so_far)
            slot.finished = True
            trajectory = episode.trajectory(outcome)
            answer = await self._redis(self._buffer.complete, lease, trajectory)
            self.counters.count(outcome, trajectory)
            self.counters.late += answer == "gone"
        finally:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await env.stop()
            except Exception as error:  # no reason to think otherwise of the attempt, which may be home already
                log.error("the environment of attempt %s did not stop", lease.attempt, exc_info=error)

    async def _resume(self, lease: Lease, episode: Unfinished) -> Outcome | None:
        """What an earlier try came to; None if the episode has to start over, and the buffer knows why."""
        try:
            so_far = await episode.resume()
        except CannotContinue as error:
            await self._redis(self._buffer.start_over, lease, str(error))
            return None
        self.counters.resumed += 1
        return so_far

    async def _save(self, slot: Slot, episode: Unfinished, outcome: Outcome) -> None:
        """After a turn: hands in a segment if there is one, or stores where the episode stands if it is time."""
        due = self._stopping or time.monotonic() - slot.saved >= self._settings.checkpoint_seconds
        if cut := episode.segment(outcome):
            held = await self._redis(self._buffer.segment, slot.lease, *cut) != "gone"
            self.counters.segments += held
            if held:
                self.counters.count_tokens(cut[1])
        elif due and episode.replayable:
            held = await self._redis(self._buffer.checkpoint, slot.lease, episode.checkpoint(outcome))
        else:
            return
        if not held:
            raise LeaseLost(f"the lease of attempt {slot.lease.attempt} is lost")
        slot.saved = time.monotonic()

    async def _fail(self, lease: Lease, reason: str, detail: str) -> None:
        answer = await self._redis(self._buffer.fail, lease, reason, detail)
        log.warning("attempt %s is %s: %s: %s", lease.attempt, answer, reason, detail)
        self.counters.failed += 1
        self.counters.failures_in_a_row += 1
        if not self._stopping:  # the slot rests, so that what is broken is not hammered
            await asyncio.sleep(min(0.05 * 2**self.counters.failures_in_a_row, LONGEST_PAUSE_SECONDS))

    async def _release(self, lease: Lease) -> None:
        await self._redis(self._buffer.release, lease)
        self.counters.released += 1

    async def _redis(self, call: Callable[..., T], *args: Any) -> T:
        """A call to the buffer, repeated until it is served; while draining only as long as the drain lasts.

        Being cancelled it waits for the call that is under way, so that it cannot reach Redis after a release.
        """
        loop = asyncio.get_running_loop()
        while True:
            running = loop.run_in_executor(self._threads, call, *args)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise
            except RedisUnavailable as error:
                if time.monotonic() > self._give_up_at:
                    raise
                log.warning("still waiting: %s", error)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._config.buffer.lease_seconds / 3)
            slots = list(self._episodes.items())
            if not slots:
                continue
            versions = {s.lease.attempt: s.episode.transcript.oldest_version for _, s in slots if s.episode}
            oldest = {attempt: version for attempt, version in versions.items() if version is not None}
            leases = await self._redis(self._buffer.heartbeat, [slot.lease for _, slot in slots], oldest)
            held = {(lease.attempt, lease.token) for lease in leases}
            for episode, slot in slots:
                is_held = (slot.lease.attempt, slot.lease.token) in held
                if not (is_held or slot.lost or slot.finished or episode.done()):
                    slot.lost = True
                    episode.cancel()

    async def _drain(self) -> None:
        if self._episodes:
            await asyncio.wait(self._episodes, timeout=max(0.0, self._give_up_at - time.monotonic()))
        left = dict(self._episodes)
        for episode, slot in left.items():
            if not slot.finished:
                episode.cancel()
        await asyncio.gather(*left, *([self._listening] if self._listening else []), return_exceptions=True)

    async def _report(self) -> None:
        while True:
            self._write_report()
            await asyncio.sleep(REPORT_SECONDS)

    def _write_report(self) -> None:
        file = self._config.run_dir / "actors" / f"{self.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            print(json.dumps(self.counters.line(len(self._episodes))), file=out)


async def main(config: ActorConfig) -> None:
    worker = Worker(config)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, worker.stop)
    await worker.run()
