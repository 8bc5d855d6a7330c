"""The tasksets of verifiers: prompts, tools, stops and rewards are theirs, the conversation is ours.

Invariant: the taskset lives in a process of its own (verifiers_worker.py), in whichever interpreter has verifiers; one
that dies, fails or misses a deadline is an `InfrastructureError`, ends, and is started again for the next episode.

Its dependencies exclude those of the engine (another openai), so beside it they need an interpreter of their own:
`python -m venv tasks && tasks/bin/pip install verifiers==0.4.0 YOUR_TASKSET`, and `python="tasks/bin/python"` here.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InfrastructureError, ToolError
from ..tasks.validation import Check
from ..tool_env import Grade, Message, Step, ToolEnv
from ..tools import Tool, ToolCall
from .order import check_split, in_split, position

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_LOOKED_AT = 200  # tasks in a row, for one of the split
_LAST_WORDS = 800  # characters of what a failed process wrote


class Verifiers(ToolEnv):
    """The environment `argosy/verifiers`.

    `taskset` is verifiers' id of it, `config` what its TasksetConfig takes; `python` the interpreter that has both.
    `seconds` is for each answer, `start_seconds` for loading the taskset.
    """

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        split: str = "all",
        python: str = sys.executable,
        max_turns: int = 16,
        seconds: float = 120.0,
        start_seconds: float = 300.0,
    ):
        check_split(split)
        self.taskset, self.config, self.split, self.max_turns = taskset, dict(config or {}), split, max_turns
        self.seconds, self._start_seconds = seconds, start_seconds
        self._key = (python, taskset, json.dumps(self.config, sort_keys=True))
        self.task = ""
        self._session = ""
        self._known = False

    def tool_schemas(self) -> list[dict[str, Any]]:
        if not self._known:
            with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
                described = thread.submit(asyncio.run, worker(self._key).ask_described(self._start_seconds)).result()
            self._learn_tools(described["tools"])
        return super().tool_schemas()

    async def setup(self, seed: int, options: dict[str, Any]) -> list[Message]:
        self._at = worker(self._key)
        described = await self._at.ask_described(self._start_seconds)
        self._learn_tools(described["tools"])
        index = await self._index(seed, described["count"])
        self._session = uuid.uuid4().hex
        opened = await self._ask("open", index=index)
        self.task = opened["id"] or f"{self.taskset}/{index}"
        messages: list[Message] = opened["messages"]
        return messages

    async def act(self, calls: Sequence[ToolCall] | None, content: str = "", error: str | None = None) -> Step:
        made = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls or ()] if error is None else []
        await self._ask("say", content=content, calls=made)
        step = await super().act(calls, content, error)
        heard = [{"name": None, **message} for message in step.messages if message["content"]]
        stop = (await self._ask("hear", messages=heard))["stop"]
        if stop is not None and not step.done:
            self.finish()
            return replace(step, done=True)
        return step

    def reply(self, content: str) -> str:
        """Who calls no tool has answered, as in verifiers' own loop."""
        self.finish()
        return ""

    async def grade(self) -> Grade:
        scored = await self._ask("score")
        return Grade(scored["reward"], scored["parts"])

    async def close_episode(self) -> None:
        session, self._session = self._session, ""
        if session and self._at.alive:
            with contextlib.suppress(InfrastructureError):  # it ended, and the session with it
                await self._at.ask(self.seconds, "close", session=session)

    async def validate(self, limit: int | None = None) -> AsyncIterator[Check]:
        """Each task opens, saying nothing earns nothing, and twice the same."""
        described = await worker(self._key).ask_described(self._start_seconds)
        count = described["count"] or _LOOKED_AT
        for seed in range(count if limit is None else min(limit, count)):
            problem: tuple[str | None, str] = (None, "")
            self.task = f"{self.taskset}/{seed}"
            try:
                first, again = [await self._silence(seed) for _ in range(2)]
                if first != again:
                    problem = ("flaky", f"no answer earned {first:g}, then {again:g}")
                elif first > 0:
                    problem = ("empty passes", f"no answer earns {first:g}")
            except InfrastructureError as error:
                problem = ("grading fails", str(error))
            yield Check(self.task, *problem)

    async def _silence(self, seed: int) -> float:
        await self.start(seed)
        try:
            await self.act(None, "")
            return (await self.score()).reward
        finally:
            await self.stop()

    async def _index(self, seed: int, count: int | None) -> int:
        first = seed if count is None else position(seed, count)
        for at in range(first, first + _LOOKED_AT):
            index = at if count is None else at % count
            if self.split == "all" or in_split((await self._ask("key", index=index))["key"], self.split):
                return index
        raise ValueError(f"{self.taskset} has no task of split {self.split!r} among {_LOOKED_AT}: use split='all'")

    async def _ask(self, do: str, **question: Any) -> dict[str, Any]:
        return await self._at.ask(self.seconds, do, session=self._session, **question)

    def _learn_tools(self, offers: list[dict[str, Any]]) -> None:
        if not self._known:
            described = [
                Tool.described(offer["name"], offer["description"] or "", offer["parameters"], _caller(offer["name"]))
                for offer in offers
            ]
            self.tools, self._known = {tool.name: tool for tool in described}, True


def _caller(tool: str) -> Callable[..., Awaitable[str]]:
    async def call(env: Verifiers, /, **arguments: Any) -> str:
        result = await env._ask("call", name=tool, arguments=arguments)
        if "error" in result:
            raise ToolError(result["error"])
        return str(result["text"])

    return call


_workers: dict[tuple[str, str, str], "Worker"] = {}


def worker(key: tuple[str, str, str]) -> "Worker":
    """This process's one worker for an interpreter, taskset and config; a new one if it ended."""
    found = _workers.get(key)
    if found is None or not found.alive:
        found = _workers[key] = Worker(*key)
    return found


class Worker:
    """The process with the taskset. Any thread may ask; one reads what it answers."""

    def __init__(self, python: str, taskset: str, config: str):
        if shutil.which(python) is None:
            raise ValueError(f"there is no interpreter {python!r} to run the verifiers taskset {taskset!r}")
        self.python, self.taskset = python, taskset
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._lock, self._numbers, self._over = threading.Lock(), itertools.count(), False
        self._open: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, name=f"verifiers {taskset}", daemon=True).start()
        self.description = self._send({"do": "describe", "taskset": taskset, "config": json.loads(config)})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._end()

    async def ask_described(self, seconds: float) -> dict[str, Any]:
        return await self._within(seconds, "describe", self.description)

    async def ask(self, seconds: float, do: str, **question: Any) -> dict[str, Any]:
        return await self._within(seconds, do, self._send({"do": do, **question}))

    async def _within(
        self, seconds: float, do: str, future: "concurrent.futures.Future[dict[str, Any]]"
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            self.stop()  # whatever it is stuck in, others wait for it as well
            raise InfrastructureError(
                f"the verifiers taskset {self.taskset!r} did not {do} within {seconds:g} s"
            ) from None

    def _send(self, question: dict[str, Any]) -> "concurrent.futures.Future[dict[str, Any]]":
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = future
            try:
                assert self._process.stdin is not None
                if self._over:
                    raise BrokenPipeError
                self._process.stdin.write((json.dumps({"number": number, **question}) + "\n").encode())
                self._process.stdin.flush()
            except OSError:
                self._open.pop(number)
                future.set_exception(self._ended())
        return future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            future = self._open.pop(said["number"])
            if "answer" in said:
                future.set_result(said["answer"])
            elif said.get("missing") == "verifiers":
                future.set_exception(
                    InfrastructureError(
                        f'{self.python} has no verifiers: pip install "argosy[verifiers]" there, or name another '
                        "interpreter with python="
                    )
                )
            else:
                future.set_exception(InfrastructureError(f"verifiers taskset {self.taskset!r}: {said['error']}"))
        self._process.wait()
        with self._lock:
            left, self._open, self._over = list(self._open.values()), {}, True
        for future in left:
            future.set_exception(self._ended())

    def _ended(self) -> InfrastructureError:
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - _LAST_WORDS))
        words = self._errors.read().decode(errors="replace").strip() or "nothing"
        return InfrastructureError(f"the process of the verifiers taskset {self.taskset!r} ended. It said: {words}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
