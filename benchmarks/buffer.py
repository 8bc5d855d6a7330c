"""What the replay buffer costs: against raw Redis, against other ways to move trajectories, and against its aims.

    .venv/bin/python benchmarks/buffer.py             a table, after some four minutes
    .venv/bin/python benchmarks/buffer.py --json      the same numbers as JSON
    .venv/bin/python benchmarks/buffer.py --check     exit status 1 if an aim is missed

Everything is measured in one run on one machine, with a redis-server as `argosy train` starts it. The contenders take
turns, a batch of trajectories each, so that what disturbs one disturbs all; throughput and ratios are medians over the
rounds, latencies percentiles over all trajectories. The receiver keeps the whole batch, as a learner does.

Ray's row needs Ray (`pip install ray`, 260 MB) and is left out without it.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import msgpack
import numpy as np
import redis
from argosy.buffer import BufferSettings, Lease, ReplayBuffer, Task, Trace, Trajectory, Turn, pack
from argosy.buffer import replay as implementation
from argosy.deploy.processes import redis_server
from rich.console import Console
from rich.table import Table

try:
    import ray
    from ray.util.queue import Queue
except ImportError:
    ray = None

SIZES = {"2k": 2_000, "16k": 16_000, "128k": 128_000}  # tokens of a trajectory
BATCH = 64  # trajectories that are put, and then got together
DISTINCT = 8  # trajectories of a batch that differ
VERSION = 3  # of the policy; trajectories are sampled by 1, 2 and 3
COMPLETE = 10_000  # groups that wait while claims are measured
CLAIMS = 100
US = 1e6

AIM_RAW = {"2k": 0.6, "16k": 0.8, "128k": 0.8}  # of the throughput of raw Redis
AIM_RAY = ("16k", 5.0)  # times the throughput of Ray's queue
AIM_CLAIM = 6.0  # round trips of PING
AIM_LEDGER = 0.10  # of the time that an attempt's whole life in the buffer takes

# The transitions without their bookkeeping: no counts, no staleness, no stories, no history.
NO_LEDGER = """
count, measure, record = function() end, function() end, function() end
tell, number_of = function() return '' end, function() return 0 end
note = function(attempt, _, ...) if ... then redis.call('HSET', attempt_key(attempt.id), ...) end end
"""


def clock(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# What is moved


def trajectory(length: int, seed: int) -> Trajectory:
    """A coding agent's episode: tool outputs of some 300 tokens, replies of some 200, by three policy versions."""
    random = np.random.default_rng(seed)
    turns: list[Turn] = []
    sampled = np.zeros(length, bool)
    while (start := turns[-1].end if turns else 0) < length:
        middle = min(length, start + int(random.integers(150, 450)))
        end = min(length, middle + int(random.integers(100, 300)))
        turns += [Turn(start, middle, "tool", "run_tests", 0.1), Turn(middle, end, "assistant", None, 1.0)]
        sampled[middle:end] = True
    trace = Trace(
        tokens=(random.zipf(1.2, length) % 150_000).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -random.exponential(0.5, length), 0.0).astype(np.float32),
        versions=np.where(sampled, 1 + np.arange(length) * VERSION // length, -1).astype(np.int32),
        rewards=[(length - 1, 1.0)],
        turns=turns,
    )
    return Trajectory(
        id=f"{seed}",
        attempt="0/0",
        task=Task("repair/0", "repair", 0),
        group="0",
        group_size=1,
        group_index=0,
        env="argosy/repair",
        status="terminated",
        reward=1.0,
        reward_parts={"tests": 1.0},
        traces=[trace],
        timing={"generate": 30.0, "tools": 2.0},
        engine="engine-0",
        actor="actor-0",
        sampling={"temperature": 1.0, "top_p": 1.0},
    )


def task(index: int) -> Task:
    return Task(f"repair/{index}", "repair", index)


def of(lease: Lease, body: Trajectory) -> Trajectory:
    return replace(body, attempt=lease.attempt, group=lease.group, task=lease.task)


# Who moves it


class Contender(Protocol):
    name: str

    def move(self, batch: list[Trajectory]) -> tuple[list[float], list[float]]:
        """From one side to the other; returns the seconds of each put and of each get."""
        ...


class Argosy:
    """`complete` for each, then one `claim` and one `get`. What else there is in an attempt's life is timed apart."""

    name = "argosy"

    def __init__(self, url: str, run: str = "benchmark", eta: int = 4) -> None:
        self.buffer = ReplayBuffer(BufferSettings(run=run, url=url, batch_size=BATCH, eta=eta))
        self.buffer.publish(VERSION, 0)
        self.step = 0
        self.lives: list[float] = []
        """Seconds of an attempt's whole life, by batch."""

    def move(self, batch: list[Trajectory]) -> tuple[list[float], list[float]]:
        leases: list[Lease] = []
        rest = clock(lambda: leases.extend(self.begin(len(batch))))
        mine = [of(lease, body) for lease, body in zip(leases, batch)]
        puts = [clock(lambda: self.buffer.complete(lease, one)) for lease, one in zip(leases, mine)]  # noqa: B023
        got: list[Trajectory] = []
        gets = clock(lambda: got.extend(self.buffer.get(self.claim())))
        assert got == mine
        rest += clock(self.end)
        self.lives.append((sum(puts) + gets + rest) / len(batch))
        return puts, [gets / len(batch)] * len(batch)

    def begin(self, n: int) -> list[Lease]:
        self.buffer.put_tasks(task, n)
        return self.buffer.lease("actor-0", n)

    def claim(self) -> list[str]:
        self.step += 1
        ids = self.buffer.claim(self.step)
        assert ids is not None
        return ids

    def end(self) -> None:
        self.buffer.publish(VERSION, self.step)
        self.buffer.commit(self.step)


class RawRedis:
    """SET and GET of the same bytes with redis-py: no packing, no states, no ledger."""

    name = "raw redis"

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def move(self, batch: list[Trajectory]) -> tuple[list[float], list[float]]:
        return self.exchange([pack(one) for one in batch], lambda blob: blob, lambda blob: blob)

    def exchange(
        self, batch: list[Any], write: Callable[[Any], bytes], read: Callable[[Any], Any]
    ) -> tuple[list[float], list[float]]:
        names = [f"plain:{i}" for i in range(len(batch))]
        puts = [clock(lambda: self.client.set(name, write(one))) for name, one in zip(names, batch)]  # noqa: B023
        got: list[Any] = []
        gets = [clock(lambda: got.append(read(self.client.get(name)))) for name in names]  # noqa: B023
        assert got[0] == batch[0]
        self.client.unlink(*names)
        return puts, gets


class Lists(RawRedis):
    """The same Redis, with msgpack of plain lists of numbers."""

    name = "msgpack lists"

    def move(self, batch: list[Trajectory]) -> tuple[list[float], list[float]]:
        return self.exchange(
            [{name: column.tolist() for name, column in columns(one).items()} for one in batch],
            msgpack.packb,
            msgpack.unpackb,
        )


class RayQueue:
    """ray.util.queue.Queue: put by this process, got by an actor, as in OpenRLHF and, with its own queue, verl."""

    name = "ray queue"

    def __init__(self) -> None:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self.queue = Queue()

        @ray.remote
        class Learner:
            def get(self, queue: Any, n: int) -> list[float]:
                got: list[Any] = []
                return [clock(lambda: got.append(queue.get())) for _ in range(n)]

        self.learner: Any = Learner.remote()  # type: ignore[attr-defined]

    def move(self, batch: list[Trajectory]) -> tuple[list[float], list[float]]:
        puts = [clock(lambda: self.queue.put(columns(one))) for one in batch]  # noqa: B023
        return puts, ray.get(self.learner.get.remote(self.queue, len(batch)))


def columns(one: Trajectory) -> dict[str, np.ndarray]:
    """What a trainer needs at least; kinder to the others than all that Argosy keeps."""
    trace = one.traces[0]
    return {name: getattr(trace, name) for name in ("tokens", "sampled", "logprobs", "versions")}


# Measurements


@dataclass
class Row:
    contender: str
    tokens: str
    trajectories_per_second: float
    mb_per_second: float
    put_us: tuple[float, float]
    """p50 and p99."""
    get_us: tuple[float, float]
    argosy_is: float
    """Argosy's throughput in multiples of this one's: the median of the rounds' ratios."""


def throughput(contenders: list[Contender], tokens: str, rounds: int) -> list[Row]:
    bodies = [trajectory(SIZES[tokens], seed) for seed in range(DISTINCT)] * (BATCH // DISTINCT)
    size = statistics.mean(len(pack(body)) for body in bodies)
    puts: dict[str, list[list[float]]] = {one.name: [] for one in contenders}
    gets: dict[str, list[list[float]]] = {one.name: [] for one in contenders}
    for number in range(rounds + 1):
        for one in contenders if number % 2 else reversed(contenders):
            put, get = one.move(bodies)
            if number:  # the first warms up
                puts[one.name].append(put)
                gets[one.name].append(get)
    seconds = {
        name: [(sum(p) + sum(g)) / len(p) for p, g in zip(puts[name], gets[name])] for name in puts
    }  # of a trajectory, by round
    rows = []
    for one in contenders:
        rate = 1 / statistics.median(seconds[one.name])
        ratio = statistics.median(theirs / ours for theirs, ours in zip(seconds[one.name], seconds[Argosy.name]))
        latencies = [percentiles([second for block in times[one.name] for second in block]) for times in (puts, gets)]
        rows.append(Row(one.name, tokens, rate, rate * size / 1e6, latencies[0], latencies[1], ratio))
    return rows


def percentiles(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return float(p50) * US, float(p99) * US


def ledger_cost(url: str, client: redis.Redis, rounds: int) -> float:
    """The microseconds that bookkeeping adds to an attempt's whole life, whatever its size: what Redis spends in the
    scripts, less what it spends in the same scripts without the ledger's lines, in turns. That its file grows by more
    is not in it."""
    body = trajectory(50, 0)
    lua = implementation._lua
    without = lambda name: lua(name) + (NO_LEDGER if name == "attempts" else "")  # noqa: E731
    booked = Argosy(url, "booked")
    with patch.object(implementation, "_lua", without):
        unbooked = Argosy(url, "unbooked")
    costs = []
    for number in range(rounds + 1):
        in_scripts = {}
        for one in (booked, unbooked) if number % 2 else (unbooked, booked):
            client.config_resetstat()
            one.move([body] * BATCH)
            in_scripts[one] = client.info("commandstats")["cmdstat_evalsha"]["usec"] / BATCH
        costs.append(in_scripts[booked] - in_scripts[unbooked])
    return statistics.median(costs[1:])  # the first warms up


@dataclass
class Claims:
    claim_us: tuple[float, float]
    ping_us: tuple[float, float]
    in_pings: float
    history_bytes_per_attempt: float


def claims(url: str, client: redis.Redis) -> Claims:
    """Claims of 64 from 10,000 complete groups; then all are trained, and what is kept of them is weighed."""
    argosy = Argosy(url, "claims", eta=COMPLETE // BATCH + 1)
    body = trajectory(50, 0)

    def complete(n: int) -> None:
        for lease in argosy.begin(n):
            argosy.buffer.complete(lease, of(lease, body))

    for done in range(0, COMPLETE, 500):
        complete(min(500, COMPLETE - done))
    claims, pings = [], []
    for _ in range(CLAIMS):
        pings += [clock(client.ping) for _ in range(10)]
        claims.append(clock(argosy.claim))
        argosy.end()
        complete(BATCH)
    while argosy.buffer.claim(argosy.step + 1) is not None:
        argosy.step += 1
        argosy.end()
    history = sum(client.memory_usage(name, samples=0) or 0 for name in client.scan_iter("{claims}:history:*", 1000))
    claim_us, ping_us = percentiles(claims), percentiles(pings)
    return Claims(claim_us, ping_us, claim_us[0] / ping_us[0], history / argosy.buffer.ledger().trained)


@dataclass
class Aim:
    what: str
    aim: str
    measured: str
    met: bool | None


def aims(rows: list[Row], lives: dict[str, float], ledger: float, claim: Claims) -> list[Aim]:
    ratios = {(row.contender, row.tokens): row.argosy_is for row in rows}
    found = []
    for tokens, least in AIM_RAW.items():
        ratio = ratios[RawRedis.name, tokens]
        found.append(Aim(f"throughput of raw Redis, {tokens}", f"≥ {least:g}", f"{ratio:.2f}", ratio >= least))
    tokens, least = AIM_RAY
    ray_ratio = ratios.get((RayQueue.name, tokens))
    measured = "Ray is not installed" if ray_ratio is None else f"{ray_ratio:.1f}"
    met = None if ray_ratio is None else ray_ratio >= least
    found.append(Aim(f"throughput of Ray's queue, {tokens}", f"≥ {least:g}", measured, met))
    pings = claim.in_pings
    found.append(
        Aim(f"claim of {BATCH} from {COMPLETE:,}, in PINGs", f"≤ {AIM_CLAIM:g}", f"{pings:.1f}", pings <= AIM_CLAIM)
    )
    for tokens, life in lives.items():
        measured = f"{ledger / life:.1%} ({ledger:.0f} of {life:,.0f} µs)"
        aim = f"< {AIM_LEDGER:.0%}"
        found.append(
            Aim(f"the ledger's share of an attempt's time, {tokens}", aim, measured, ledger / life < AIM_LEDGER)
        )
    return found


# Around them


@contextmanager
def own_redis() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="argosy-benchmark-"))
    socket = folder / "redis.sock"
    server = redis_server(folder / "redis", socket, folder / "redis.log")
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not socket.exists():
            assert time.monotonic() < deadline, "redis-server did not start within 20 s"
            time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder)


def show(rows: list[Row], claim: Claims, found: list[Aim], about: str) -> None:
    console = Console()
    console.width = max(console.width, 104)  # also into a file
    table = Table(title="Put and got", title_justify="left", caption=about)
    for heading in ("tokens", "", "MB/s", "per s", "put µs: p50", "p99", "get µs: p50", "p99", "argosy is"):
        table.add_column(heading, justify="left" if heading in ("tokens", "") else "right", no_wrap=True)
    for i, row in enumerate(rows):
        latencies = [f"{us:,.0f}" for us in (*row.put_us, *row.get_us)]
        rates = [f"{rate:,.0f}" for rate in (row.mb_per_second, row.trajectories_per_second)]
        times = "" if row.contender == Argosy.name else f"{row.argosy_is:.2f} ×"
        last = i + 1 == len(rows) or rows[i + 1].tokens != row.tokens
        table.add_row(row.tokens, row.contender, *rates, *latencies, times, end_section=last)
    console.print(table)
    table = Table(title="Aims", title_justify="left")
    for heading in ("", "aim", "measured", ""):
        table.add_column(heading, no_wrap=True)
    for aim in found:
        verdict = "not measured" if aim.met is None else "[green]met[/]" if aim.met else "[red]missed[/]"
        table.add_row(aim.what, aim.aim, aim.measured, verdict)
    console.print(table)
    (p50, p99), ping = claim.claim_us, claim.ping_us[0]
    console.print(f"A claim takes {p50:,.0f} µs (p99 {p99:,.0f}), a PING {ping:.0f} µs.")
    console.print(f"A finished attempt leaves {claim.history_bytes_per_attempt:.0f} bytes of history.")
    if ray is None:
        console.print("Ray's row is missing: .venv/bin/python -m pip install ray")


def main() -> int:
    parser = argparse.ArgumentParser(description="What the replay buffer costs.")
    parser.add_argument("--rounds", type=int, default=20, help="batches of each contender and size (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if an aim is missed")
    options = parser.parse_args()
    with own_redis() as url:
        client = redis.Redis.from_url(url)
        argosy = Argosy(url)
        contenders: list[Contender] = [argosy, RawRedis(client), Lists(client)]
        if ray is not None:
            contenders.append(RayQueue())
        rows, lives = [], {}
        for tokens in SIZES:
            argosy.lives.clear()
            rows += throughput(contenders, tokens, options.rounds)
            lives[tokens] = statistics.median(argosy.lives) * US
        if ray is not None:
            ray.shutdown()
        ledger = ledger_cost(url, client, 5 * options.rounds)
        claim = claims(url, client)
        version = client.info("server")["redis_version"]
    found = aims(rows, lives, ledger, claim)
    about = f"Redis {version}, redis-py {redis.__version__}, Python {platform.python_version()}, {platform.machine()}"
    if options.json:
        rest = {"whole_life_us": lives, "ledger_us": ledger, "claims": asdict(claim)}
        results = {"about": about, "rows": [asdict(row) for row in rows]} | rest
        print(json.dumps(results | {"aims": [asdict(aim) for aim in found]}, indent=2, ensure_ascii=False))
    else:
        show(rows, claim, found, about)
    return 1 if options.check and any(aim.met is False for aim in found) else 0


if __name__ == "__main__":
    sys.exit(main())
