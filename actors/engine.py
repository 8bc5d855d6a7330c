"""The client of the engines that serve this run: ids in, sampled ids with log-probabilities and versions out.

Invariant: `generate` either returns tokens that one engine sampled in one go, each labelled by that engine with the
weights that sampled it, or raises; a request that died with its engine is asked again, with the same ids, of the next
one. Versions come from the engine and are never assumed. It waits for engines to appear in the weight ledger, where
the engine servers register, and for the engine's answer; both have a deadline.
"""

import asyncio
import logging
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson

from ..buffer import EngineRecord, RedisUnavailable, WeightLedger
from .errors import EngineRefused, EngineUnavailable, OutOfTime

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0  # how old the list of engines may be
RETRY_SECONDS = 0.1  # the same while no engine answers
ABORT_SECONDS = 5.0  # an engine that does not take an abort in this time will not take it later either


@dataclass(frozen=True)
class Generation:
    """Generation(ids=[5, 2], logprobs=[-0.5, -0.1], versions=[3, 4], finish="stop", engine="engine-0")."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: str
    """"stop": the model closed its message; "length": it was cut off."""
    engine: str = ""
    prefilled: int = 0
    """Ids of the prompt that the engine computed because its prefix cache did not have them."""
    waited: float = 0.0
    """Seconds spent waiting for an engine to be there at all."""


class Engine:
    """`async with Engine(WeightLedger(settings), vocab_size=...) as engine: await engine.generate(...)`"""

    def __init__(self, ledger: WeightLedger, vocab_size: int, patience: float = 120) -> None:
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._patience = patience
        self._engines: dict[str, EngineRecord] = {}
        self._looked = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._suspects: dict[str, float] = {}  # engines that failed, and when they had last been heard of

    async def __aenter__(self) -> Self:
        # No limit on the whole of a request: how long a generation may take is the caller's to say.
        timeout = aiohttp.ClientTimeout(total=None, connect=5)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._looking is not None:
            await self._looking
        await self._http.close()

    async def generate(
        self, ids: Sequence[int], sampling: Mapping[str, Any], rid: str, seconds: float = 600
    ) -> Generation:
        """Continues `ids`; OutOfTime after `seconds` of generating, EngineUnavailable after `patience` without engine.

        Requests with the same `rid` up to its last "/" go to the same engine while it lives, for its prefix cache.
        """
        if not ids or min(ids) < 0 or max(ids) >= self._vocab_size:  # SGLang would die of it
            raise EngineRefused(f"token ids must be in [0, {self._vocab_size}), got {_odd(ids, self._vocab_size)}")
        started = time.monotonic()
        give_up = started + self._patience
        failed = False
        while True:
            name, record = await self._choose(rid.rpartition("/")[0], give_up)
            waited = time.monotonic() - started
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._ask(record.url, ids, sampling, rid)
            except (aiohttp.ClientError, ConnectionError) as error:
                log.warning("engine %s failed in request %s: %r", name, rid, error)
                self._suspects[name] = record.seen
                give_up = give_up if failed else time.monotonic() + self._patience
                failed = True
                continue
            except TimeoutError:
                raise OutOfTime(f"request {rid} took engine {name} more than {seconds:.0f} s") from None
            return _generation(answer, name, waited)

    async def _choose(self, session: str, give_up: float) -> tuple[str, EngineRecord]:
        """An engine that is alive, always the same for a session while the engines stay the same."""
        while True:
            # An engine that failed is trusted again after its next heartbeat, or when it has registered anew.
            alive = {n: record for n, record in self._engines.items() if record.seen != self._suspects.get(n)}
            self._look(REFRESH_SECONDS if alive else RETRY_SECONDS)
            if alive:
                name = max(alive, key=lambda name: zlib.crc32(f"{name} {session}".encode()))
                return name, alive[name]
            if time.monotonic() > give_up:
                known = {name: record.url for name, record in self._engines.items()} or "none is registered"
                raise EngineUnavailable(
                    f"no engine answered for {self._patience:.0f} s ({known}): see their logs in the run's folder"
                )
            await asyncio.sleep(RETRY_SECONDS)

    def _look(self, age: float) -> None:
        """Reads the list of engines again if it is older than `age`; nobody who knows an engine waits for that."""
        if (self._looking is None or self._looking.done()) and time.monotonic() - self._looked > age:
            self._looking = asyncio.create_task(self._read_engines())

    async def _read_engines(self) -> None:
        self._looked = time.monotonic()
        try:
            self._engines = await asyncio.to_thread(self._ledger.engines)
        except RedisUnavailable as error:
            log.warning("the list of engines stays as it was: %s", error)

    async def _ask(self, url: str, ids: Sequence[int], sampling: Mapping[str, Any], rid: str) -> dict[str, Any]:
        # SGLang aborts every request whose rid begins with the one it is told, so each ends in something unique.
        unique = f"{rid}#{uuid.uuid4().hex[:12]}"
        body = {"input_ids": ids, "sampling_params": sampling, "rid": unique, "return_logprob": True}
        try:
            data, headers = orjson.dumps(body), {"Content-Type": "application/json"}
            async with self._http.post(f"{url}/generate", data=data, headers=headers) as response:
                payload = await response.read()
                if response.status == 400:
                    raise EngineRefused(f"{url} refused request {rid}: {payload[:500].decode(errors='replace')}")
                response.raise_for_status()
        except asyncio.CancelledError:  # also on a deadline: nobody waits for these tokens any more
            await asyncio.shield(self._abort(url, unique))
            raise
        answer = orjson.loads(payload)
        if answer["meta_info"]["finish_reason"]["type"] == "abort":  # not by us: the engine is going down
            raise ConnectionAbortedError(f"{url} aborted request {rid}")
        return answer

    async def _abort(self, url: str, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                async with self._http.post(f"{url}/abort_request", json={"rid": rid}):
                    pass
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            pass  # an engine that cannot be told is dead, and its requests with it


def _generation(answer: dict[str, Any], engine: str, waited: float) -> Generation:
    meta = answer["meta_info"]
    sampled = meta["output_token_logprobs"]
    versions = [int(run["version"]) for run in meta["weight_versions"] for _ in range(run["start"], run["end"])]
    ids = [each[1] for each in sampled]
    if not len(versions) == len(ids) == len(answer["output_ids"]):
        raise EngineRefused(f"{engine} labelled {len(versions)} of {len(ids)} sampled tokens with a version: {meta}")
    finish = meta["finish_reason"]["type"]
    prefilled = meta["prompt_tokens"] - meta["cached_tokens"]
    return Generation(ids, [each[0] for each in sampled], versions, finish, engine, prefilled, waited)


def _odd(ids: Sequence[int], vocab_size: int) -> object:
    return [i for i in ids if not 0 <= i < vocab_size][:5] or "none at all"
