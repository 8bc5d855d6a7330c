"""Redis away, loading, full or restarted delays a call and never loses it; what waiting cannot mend is said at once."""

import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from argosy.buffer import BufferSettings, Lease, RedisUnavailable, ReplayBuffer, Task, Trajectory
from argosy.buffer.errors import RedisRefused

if TYPE_CHECKING:
    from conftest import RedisServer

TaskOf = Callable[[int], Task]
Bring = Callable[..., Trajectory]


def settings(server: "RedisServer", **changes: object) -> BufferSettings:
    return BufferSettings.model_validate({"run": "r", "url": server.url, "batch_size": 1, "eta": 1} | changes)


def test_a_deadline_names_the_server_and_what_to_check(redis_server: "RedisServer") -> None:
    buffer = ReplayBuffer(settings(redis_server, patience_seconds=0.3))
    assert buffer.version() == 0
    redis_server.kill()
    with pytest.raises(
        RedisUnavailable, match=r"version: Redis at unix://.*redis.sock does not answer for 0.3 s.*Check"
    ):
        buffer.version()


def test_a_restart_is_survived_with_leases_and_payloads(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server))
    buffer.put_tasks(task, 2)
    first, second = buffer.lease("actor-0", 2)
    buffer.complete(first, bring(first))
    redis_server.kill()
    timer = threading.Timer(0.5, redis_server.start)
    timer.start()
    with caplog.at_level(logging.WARNING):
        assert buffer.complete(second, bring(second)) == "ok"
    timer.join()
    assert "complete waits: Redis at unix://" in caplog.text
    assert buffer.claim(1) == ["0/0"]
    assert buffer.get(["0/0", "1/0"]) == [bring(first), bring(second)]


def test_leases_outlive_an_outage_but_not_their_dead_workers(redis_server: "RedisServer", task: TaskOf) -> None:
    rules = settings(redis_server, lease_seconds=2)
    buffer = ReplayBuffer(rules)
    buffer.put_tasks(task, 2)
    alive, dead = buffer.lease("actor-0", 2)
    redis_server.kill()
    time.sleep(2.1)
    redis_server.start()
    other = ReplayBuffer(rules)
    other.version()
    assert other.lease("actor-1", 2) == []
    assert [lease.attempt for lease in buffer.heartbeat([alive])] == [alive.attempt]
    time.sleep(1.2)
    assert [lease.attempt for lease in other.lease("actor-1", 2)] == [dead.attempt]


def test_the_learner_reconciles_before_anything_else_reaches_a_restarted_redis(
    redis_server: "RedisServer", task: TaskOf, bring: Bring
) -> None:
    calls = []

    def reconcile() -> None:
        calls.append(buffer.version())
        buffer.reconcile({1: ["0/0"]}, {}, version=3)

    buffer = ReplayBuffer(settings(redis_server), on_restart=reconcile)
    buffer.put_tasks(task, 1)
    buffer.lease("actor-0", 1)
    for restarts in (1, 2):
        redis_server.kill()
        redis_server.start()
        assert buffer.version() == 3
        assert len(calls) == restarts
    assert buffer.state("0/0") == "claimed"


def test_half_a_transition_never_comes_back(redis_server: "RedisServer", task: TaskOf) -> None:
    """Redis forgets a transition that a power cut tore, and without a rewrite it applies half of it a restart later."""
    buffer = ReplayBuffer(settings(redis_server, batch_size=8))
    buffer.put_tasks(task, 8)
    redis_server.kill()
    redis_server.lose_tail(30)
    redis_server.start(repair=False)
    assert buffer.ledger().created == 0
    buffer.rewind(0, {})
    deadline = time.monotonic() + 20
    while redis_server.client().info("persistence")["aof_rewrite_in_progress"]:
        assert time.monotonic() < deadline, "the rewrite does not end"
        time.sleep(0.01)
    assert buffer.put_tasks(task, 3) == 3
    redis_server.kill()
    redis_server.start(repair=False)
    ledger = buffer.ledger()
    assert (ledger.created, ledger.live["queued"], ledger.balanced) == (3, 3, True)


def test_a_full_redis_holds_workers_back_and_lets_the_learner_make_room(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server, batch_size=4, eta=9))
    buffer.put_tasks(task, 40)
    leases = buffer.lease("actor-0", 40)
    client = redis_server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
    answers: list[str] = []

    def work() -> None:
        for lease in leases:
            answers.append(buffer.complete(lease, bring(lease, length=10_000)))  # 82 kB

    with caplog.at_level(logging.WARNING):
        worker = threading.Thread(target=work)
        worker.start()
        deadline = time.monotonic() + 20
        while "is full (maxmemory)" not in caplog.text:
            assert time.monotonic() < deadline, "Redis never got full"
            time.sleep(0.02)
    assert worker.is_alive() and 4 <= len(answers) < 40
    assert len(buffer.heartbeat(leases)) == 40 - len(answers)
    for step in range(1, 11):
        while buffer.claim(step) is None:
            assert time.monotonic() < deadline, f"step {step} never came"
            buffer.wait(0.1)
        buffer.publish(step if step < 9 else 9, trained_step=step)
        buffer.commit(step)
    worker.join(20)
    assert answers == ["ok"] * 40
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.balanced) == (40, True)


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 20
    while text not in caplog.text:
        assert time.monotonic() < deadline, f"nobody said {text!r}"
        time.sleep(0.02)


def train_everything(buffer: ReplayBuffer, steps: int) -> None:
    deadline = time.monotonic() + 30
    for step in range(1, steps + 1):
        while buffer.claim(step) is None:
            assert time.monotonic() < deadline, f"step {step} never came: {buffer.stats()}"
            buffer.wait(0.1)
        buffer.publish(buffer.next_version(), trained_step=step)
        buffer.commit(step)


class Sender(threading.Thread):
    """Brings trajectories of 82 kB home, and remembers what was acknowledged when."""

    def __init__(self, buffer: ReplayBuffer, leases: list[Lease], bring: Bring) -> None:
        super().__init__()
        self.buffer, self.leases, self.bring = buffer, leases, bring
        self.acknowledged: dict[str, float] = {}

    def run(self) -> None:
        for lease in self.leases:
            assert self.buffer.complete(lease, self.bring(lease, length=10_000)) == "ok"
            self.acknowledged[lease.attempt] = time.monotonic()


def test_a_full_disk_delays_everybody_and_drops_nothing(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server, batch_size=4, eta=9))
    buffer.put_tasks(task, 40)
    leases = buffer.lease("actor-0", 40)
    redis_server.fill_disk(left=1_000_000)
    worker = Sender(buffer, leases, bring)
    learner = threading.Thread(target=train_everything, args=(buffer, 10))
    with caplog.at_level(logging.WARNING):
        worker.start()
        wait_for("complete waits: Redis at unix://", caplog)
        learner.start()
        wait_for("claim waits: Redis at unix://", caplog)
    assert "cannot write its disk (MISCONF Errors writing to the AOF file" in caplog.text
    acknowledged = len(worker.acknowledged)
    assert worker.is_alive() and learner.is_alive() and 4 <= acknowledged < 40
    ledger = buffer.ledger()  # who only asks is answered
    assert (ledger.live["ready"], ledger.live["leased"], ledger.balanced) == (acknowledged, 40 - acknowledged, True)
    redis_server.free_disk()
    worker.join(30)
    learner.join(30)
    ledger = buffer.ledger()
    assert (len(worker.acknowledged), ledger.trained, ledger.dropped, ledger.balanced) == (40, 40, {}, True)


def test_a_redis_killed_at_a_full_disk_loses_at_most_a_second(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server, batch_size=4, eta=9, lease_seconds=2))
    buffer.put_tasks(task, 40)
    leases = buffer.lease("actor-0", 40)
    worker = Sender(buffer, leases[2:], bring)
    for lease in leases[:2]:
        buffer.complete(lease, bring(lease))
        worker.acknowledged[lease.attempt] = time.monotonic()
    time.sleep(1.1)
    redis_server.fill_disk(left=1_000_000)
    with caplog.at_level(logging.WARNING):
        worker.start()
        wait_for("cannot write its disk", caplog)
    full = time.monotonic()
    redis_server.kill(written=False)
    redis_server.start()
    worker.join(30)
    assert len(worker.acknowledged) == 40
    after = {attempt: buffer.state(attempt) for attempt in worker.acknowledged}
    assert set(after.values()) <= {"ready", "leased"}
    lost = [attempt for attempt, state in after.items() if state == "leased"]
    assert all(full - 1 < worker.acknowledged[attempt] < full for attempt in lost), (lost, worker.acknowledged, full)
    deadline = time.monotonic() + 20
    while lost:  # nobody sends heartbeats for them
        assert time.monotonic() < deadline, f"{lost} do not come back"
        for lease in buffer.lease("actor-1", 40):
            buffer.complete(lease, bring(lease))
            lost.remove(lease.attempt)
        time.sleep(0.1)
    train_everything(buffer, 10)
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.dropped, ledger.balanced) == (40, {}, True)


def test_a_loading_redis_is_waited_for(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    learner = ReplayBuffer(settings(redis_server), on_restart=lambda: told.append("restarted"))
    learner.put_tasks(task, 1)
    (lease,) = learner.lease("actor-0", 1)
    with redis_server.client().pipeline(transaction=False) as pipe:  # Redis answers after each 1024 commands it loads
        for number in range(12_000):
            pipe.set("number", number)
        pipe.execute()
    redis_server.kill()
    redis_server.socket.unlink()
    starter = threading.Thread(target=redis_server.start, args=("--key-load-delay", "250"))  # microseconds a command
    starter.start()
    while not redis_server.socket.exists():
        time.sleep(0.01)
    with caplog.at_level(logging.WARNING):
        assert ReplayBuffer(settings(redis_server)).complete(lease, bring(lease)) == "ok"
    starter.join(20)
    assert "complete waits: Redis at unix://" in caplog.text and "is loading its file (Redis is loading" in caplog.text
    assert (learner.claim(1), told) == (["0/0"], ["restarted"])


@pytest.fixture
def tls_url(redis_server: "RedisServer") -> str:
    """A Redis that speaks TLS with a certificate of our own, and knows one user for the run `r`."""
    program = shutil.which("redis-server")
    if not program or not shutil.which("openssl") or b"tls-cert-file" not in Path(program).read_bytes():
        pytest.skip("this redis-server was built without TLS, or there is no openssl to make a certificate")
    for name in ("ours", "theirs"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        name_of_it = ["-subj", "/CN=argosy", "-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name_of_it, *files]
        subprocess.run(command, cwd=redis_server.folder, check=True, capture_output=True, timeout=20)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = str(redis_server.folder / "ours")
    redis_server.kill()
    tls = ["--tls-cert-file", f"{ours}.crt", "--tls-key-file", f"{ours}.key", "--tls-ca-cert-file", f"{ours}.crt"]
    user = ["--user", "learner", "on", ">open/sesame", "~{r}:*", "+@all", "-@dangerous", "+info"]
    redis_server.start("--tls-port", str(port), *tls, "--tls-auth-clients", "no", *user)
    return f"rediss://learner:open%2Fsesame@127.0.0.1:{port}?ssl_ca_certs={ours}.crt"


def test_a_run_over_tls_with_a_user_of_its_own(
    redis_server: "RedisServer", tls_url: str, task: TaskOf, bring: Bring
) -> None:
    buffer = ReplayBuffer(settings(redis_server, url=tls_url))
    buffer.rewind(0, {})
    assert buffer.put_tasks(task, 2) == 2
    for lease in buffer.lease("actor-0", 2):
        assert buffer.complete(lease, bring(lease, length=100_000)) == "ok"
    assert buffer.claim(1) == ["0/0"]
    assert [trajectory.attempt for trajectory in buffer.get(["0/0"])] == ["0/0"]
    buffer.wait(0.01)
    train_everything(buffer, 2)
    assert buffer.ledger().trained == 2
    other = ReplayBuffer(settings(redis_server, url=tls_url, run="somebody-elses"))
    with pytest.raises(RedisRefused, match="key"):
        other.put_tasks(task, 1)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("open%2Fsesame", "close", "check the user and password in its url"),
        ("learner:", "intruder:", "check the user and password in its url"),
        ("ours.crt", "theirs.crt", "CERTIFICATE_VERIFY_FAILED.*check ssl_ca_certs in its url"),
        ("127.0.0.1", "localhost", "CERTIFICATE_VERIFY_FAILED.*check ssl_ca_certs in its url"),
    ],
)
def test_what_tls_and_redis_refuse_is_not_waited_for(
    right: str, wrong: str, message: str, redis_server: "RedisServer", tls_url: str
) -> None:
    buffer = ReplayBuffer(settings(redis_server, url=tls_url.replace(right, wrong)))
    with pytest.raises(RedisRefused, match=message):
        buffer.version()
