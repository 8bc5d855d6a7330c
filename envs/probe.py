"""The process in which `check` plays an environment, so that whatever that does is seen from outside.

Invariant: before anything of the environment runs, its pipe says what, and within how many seconds it is to be done;
the one who started it (check.py) ends it when that time is over. What it leaves behind is counted after its event loop
is closed, so only what the environment itself forgot is left; then that is killed.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from .errors import InfrastructureError, ReplayDiffers
from .random_calls import Turn, odd_turns, valid_call
from .registry import make_env
from .sandboxes import close_shared_pools
from .tool_env import Message, ToolEnv

TURNS = 20  # of an episode at most; what comes later is much like what came before
LEISURELY = 2.0  # an episode that takes so many seconds is played for two seeds only
TICK = 0.01  # how often the event loop is to come round
SETTLING = 2.0  # seconds that killed processes may take to be gone
STDLIB = str(Path(asyncio.__file__).parent.parent)
PR_SET_CHILD_SUBREAPER = 36

Episode = dict[str, Any]
"""`ToolEnv.checkpoint()`, and beside it: policy, reward, parts, rewards (of turns), end, seconds, failure, said."""


@dataclass
class Probe:
    env: str
    kwargs: dict[str, Any]
    seeds: int
    seconds: float
    """How long a single call may take."""
    parse: str
    """Function that reads a model's text, "module:name"; "": experts are not asked."""
    thorough: bool
    """Also play again, replay, play side by side, count what is left, and ask Gymnasium."""
    pipe: int
    blocked: tuple[float, str] = (0.0, "")
    endings: list[dict[str, Any]] = field(default_factory=list)
    """What went wrong with ending episodes."""
    doing: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        self.tell("loading the environment", 4 * self.seconds)
        try:
            env = self._make()
            self.result |= self._describe(env)
        except Exception as error:
            self.result["failure"] = _failure(self.doing, error)
            return
        at_first = left_open()
        before = time.monotonic()
        asyncio.run(self._batch(self._play_once))
        if self.thorough and time.monotonic() - before > LEISURELY:
            self.seeds = min(self.seeds, 2)
        self.result["seeds"] = self.seeds
        once = left_open()
        asyncio.run(self._batch(self._play_all if self.thorough else self._play_first))
        if self.thorough:
            many = left_open(len(once["processes"]))
            self.result["left"] = {kind: [at_first[kind], once[kind], many[kind]] for kind in many}
            self.tell("gymnasium's check_env", 10 * self.seconds)
            self.result |= {"gymnasium": self._ask_gymnasium(), "endings": self.endings}

    def tell(self, doing: str, seconds: float) -> None:
        self.doing = doing
        self.write({"doing": doing, "seconds": seconds})

    def write(self, line: dict[str, Any]) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[os.write(self.pipe, data) :]

    def _make(self) -> ToolEnv:
        return make_env(self.env, **self.kwargs)

    def _describe(self, env: ToolEnv) -> dict[str, Any]:
        policies = ["random", "odd"]
        if self.parse and type(env).expert is not ToolEnv.expert:
            policies.append("expert")
        self.policies = policies
        doc = (type(env).__doc__ or "").strip().partition("\n")[0]
        facts = {"tools": env.tool_schemas(), "max_turns": env.max_turns, "replayable": env.replayable}
        return {**facts, "policies": policies, "class": type(env).__name__, "doc": doc}

    async def _batch(self, work: Callable[[], Any]) -> None:
        heart = asyncio.create_task(self._beat())
        try:
            await work()
        finally:
            heart.cancel()
            await close_shared_pools()

    async def _beat(self) -> None:
        """Whoever keeps this from coming round keeps all other episodes of an actor waiting."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            self.blocked = max(self.blocked, (time.perf_counter() - before - TICK, self.doing))

    async def _play_once(self) -> None:
        async with self._own(self._make()) as env:
            await self._play(env, 0, "random")

    async def _play_first(self) -> None:
        self.result["first"] = [
            await self._alone(seed, policy) for policy in self.policies for seed in range(self.seeds)
        ]

    async def _play_all(self) -> None:
        first, again = [], []
        for policy in self.policies:
            async with self._own(self._make()) as env:
                once = [await self._play(env, seed, policy) for seed in range(self.seeds)]
                again += [one if "failure" in one else await self._play(env, one["seed"], policy) for one in once]
                first += once
        self.result |= {"first": first, "again": again, "blocked": self.blocked}  # a replay is many turns at once
        self.result["replayed"] = [await self._replay(episode) for episode in first]
        self.result["together"] = await asyncio.gather(*map(self._replay, one_of_each(first)))

    async def _alone(self, seed: int, policy: str) -> Episode:
        async with self._own(self._make()) as env:
            return await self._play(env, seed, policy)

    @contextlib.asynccontextmanager
    async def _own(self, env: ToolEnv) -> AsyncIterator[ToolEnv]:
        try:
            yield env
        finally:
            try:
                await self._within("ending an episode", env.stop())
            except Exception as error:
                self.endings.append(_failure(self.doing, error))

    async def _play(self, env: ToolEnv, seed: int, name: str) -> Episode:
        """One episode up to its grade, or to the first exception."""
        episode: Episode = {"policy": name, "seed": seed, "end": "cut", "seconds": [], "rewards": [], "said": []}
        try:
            messages = list(await self._within(f"setup of seed {seed}", env.start(seed)))
            policy = await self._policy(env, seed, name)
            while len(episode["rewards"]) < TURNS and (turn := await _resolve(policy(messages))) is not None:
                calls, content, error = turn
                episode["said"].append(content + "".join(map(str, calls or ())))
                messages.append({"role": "assistant", "content": episode["said"][-1]})
                before = time.perf_counter()
                try:
                    step = await self._within(f"{_shown(turn)} in seed {seed}", env.act(calls, content, error))
                except Exception:
                    answered = len(env.checkpoint()["turns"][-1]["messages"])
                    self.doing = f"{_shown(((calls or ())[answered:][:1], content, error))} in seed {seed}"
                    raise
                episode["seconds"].append(time.perf_counter() - before)
                episode["rewards"].append(step.reward)
                messages += step.messages
                if step.done:
                    episode["end"] = "truncated" if step.truncated else "terminated"
                    break
            await self._grade(env, episode)
        except Exception as error:  # an environment is its author's code: anything may come out of it
            episode["failure"] = _failure(self.doing, error)
        return {**episode, **env.checkpoint()}

    async def _replay(self, played: Episode) -> Episode:
        """The same calls to a new object; as far as it answers the same."""
        episode: Episode = {"policy": played["policy"], "seed": played["seed"]}
        if "failure" in played:
            return episode
        async with self._own(self._make()) as env:
            try:
                seconds = self.seconds * (2 + len(played["turns"]))
                await self._within(f"replaying seed {played['seed']}", env.replay(played), seconds)
                await self._grade(env, episode)
            except ReplayDiffers:
                pass  # seen by whoever compares the two
            except Exception as error:
                episode["failure"] = _failure(self.doing, error)
            return {**episode, **env.checkpoint()}

    async def _grade(self, env: ToolEnv, episode: Episode) -> None:
        grade = await self._within(f"grade of seed {episode['seed']}", env.score())
        episode |= {"reward": grade.reward, "parts": dict(grade.parts)}

    async def _policy(self, env: ToolEnv, seed: int, name: str) -> Any:
        rng = random.Random(f"{name} {seed}")
        if name == "odd":
            odd = iter(odd_turns(env.tool_schemas(), rng))
            return lambda messages: next(odd, None)
        if name == "random":
            return lambda messages: ([valid_call(env.tool_schemas(), messages, rng)], "", None)
        module, _, function = self.parse.partition(":")
        parse = getattr(importlib.import_module(module), function)
        say = await _resolve(env.expert(rng))

        async def answer(messages: list[Message]) -> Turn:
            text = await _resolve(say(list(messages)))
            content, calls, error = parse(text)
            return calls, content, error

        return answer

    async def _within(self, doing: str, work: Any, seconds: float | None = None) -> Any:
        limit = seconds or self.seconds
        self.tell(doing, limit)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await work
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(f"no answer within {limit:g} s") from error
            raise
        finally:
            for _ in range(3):  # so that `_beat` comes round while it is known what took the time
                await asyncio.sleep(0)

    def _ask_gymnasium(self) -> list[str]:
        """What it complains of."""
        env = self._make()
        env.spec = EnvSpec("argosy/checked-v0", entry_point=cast(Any, self._make))  # else it cannot check `close`
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check_env(env)
                env.close()
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]
        said = [re.sub(r"\x1b\[\d*m|WARN: ", "", str(one.message)) for one in caught if "gymnasium" in one.filename]
        return list(dict.fromkeys(said))


def one_of_each(episodes: Sequence[Episode]) -> list[Episode]:
    """The first of each policy."""
    return list({episode["policy"]: episode for episode in reversed(episodes)}.values())


def left_open(expected: int = 0) -> dict[str, list[str]]:
    """Processes below this one (those that ran away too), open files and threads; after a moment to settle."""
    gc.collect()
    deadline = time.monotonic() + SETTLING
    while len(family := descendants(os.getpid())) > expected and time.monotonic() < deadline:
        time.sleep(TICK)
    files = []
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            files.append(str(link.readlink()))
    return {
        "processes": [f"{pid} {command}" for pid, command in family.items()],
        "files": sorted(files),
        "threads": [thread.name for thread in threading.enumerate()],
    }


def descendants(pid: int) -> dict[int, str]:
    """Living processes below one, with their commands."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents[int(folder.name)], commands[int(folder.name)] = int(parent), command
    below: dict[int, str] = {}
    while more := {child for child, parent in parents.items() if parent in {pid, *below}} - below.keys():
        below |= {child: commands[child] for child in more}
    return below


def _failure(doing: str, error: BaseException) -> dict[str, Any]:
    """What was going on, what came of it, and the line of the author's code, not of ours, where it happened."""
    frames: list[traceback.FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # where a deadline struck is in the cancellation behind the TimeoutError
        frames += traceback.extract_tb(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    theirs = [frame for frame in frames if not _is_plumbing(frame.filename)] or frames
    where = f"{_short(theirs[-1].filename)}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else ""
    what = {"kind": type(error).__name__, "error": str(error) or repr(error)}
    return {"doing": doing, **what, "where": where, "infrastructure": isinstance(error, InfrastructureError)}


def _is_plumbing(file: str) -> bool:
    """Python's own or ours."""
    pythons = file.startswith(STDLIB) and "site-packages" not in file
    return pythons or file.startswith((str(Path(__file__).parent), "<"))


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _shown(turn: Turn) -> str:
    calls, content, error = turn
    text = " ".join(f"{call.name}({json.dumps(call.arguments)})" for call in calls or ())
    text = text or f"a turn without a call ({error or content!r})"
    return text if len(text) < 120 else text[:120] + "..."


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # who runs away from its parent comes to us
    probe = Probe(**json.loads(sys.argv[1]))
    os.set_inheritable(probe.pipe, False)
    probe.run()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    probe.write({"result": probe.result})
    sys.stderr.flush()
    os._exit(0)  # a thread that was left behind must not hold us


if __name__ == "__main__":
    main()
