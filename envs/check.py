"""Is an environment fit for training? It is played in processes of its own, and each finding comes with its fix.

Invariant: `check` returns within the deadlines it was given, whatever the environment does, and nothing that it started
is left. A finding is "fail" when training would be wrong or would stall, "warn" when it would be worse than it need be.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from . import findings
from .findings import Finding
from .probe import descendants
from .tool_env import Message

GRACE = 5.0  # seconds beyond what the probe allows itself
START = 60.0  # seconds until the probe has imported Argosy


@dataclass(frozen=True)
class Report:
    env: str
    findings: list[Finding]
    tools: list[dict[str, Any]] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    """What the model would see before its first word."""
    episode: list[Message] = field(default_factory=list)
    """What follows: the expert's words, else random ones, and the answers."""

    @property
    def ok(self) -> bool:
        return all(finding.status != "fail" for finding in self.findings)


def check(
    env: str,
    kwargs: Mapping[str, Any] | None = None,
    seeds: int = 3,
    seconds: float = 30.0,
    parse: str = "",
    say: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Play an environment (anything that `make_env` takes) with random calls, odd ones and, if `parse` names what reads
    a model's text ("module:function"), its expert. `seconds`: how long one call may take. `say` hears what goes on."""
    request = {"env": env, "kwargs": dict(kwargs or {}), "seeds": seeds, "seconds": seconds, "parse": parse}
    played, stuck = _probe({**request, "thorough": True}, "0", say)
    if stuck is not None:
        return Report(env, [stuck])
    if (failure := played.get("failure")) is not None:
        return Report(env, [findings.not_loaded(failure)])
    elsewhere, stuck = _probe({**request, "seeds": played["seeds"], "thorough": False}, "1", say)
    found = findings.of(played, stuck or findings.elsewhere(played, elsewhere))
    return Report(env, list(found), played["tools"], *findings.conversation(played["first"]))


def _probe(request: dict[str, Any], hash_seed: str, say: Callable[[str], None]) -> tuple[Any, Finding | None]:
    """What the probe found, or what it died of or stuck in."""
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as said, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(
            [sys.executable, "-m", "argosy.envs.probe", json.dumps({**request, "pipe": theirs})],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=[theirs],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            start_new_session=True,
        )
        os.close(theirs)
        selector.register(ours, selectors.EVENT_READ)
        doing, seconds, deadline, rest = "starting", START, time.monotonic() + START, b""
        try:
            while selector.select(max(0.0, deadline - time.monotonic())):
                if not (data := os.read(ours, 1 << 20)):
                    process.wait(GRACE)
                    return None, findings.died(doing, process.returncode, _tail(said))
                *lines, rest = (rest + data).split(b"\n")
                for event in map(json.loads, lines):
                    if "result" in event:
                        process.wait(GRACE)
                        return event["result"], None
                    doing, seconds = event["doing"], event["seconds"]
                    deadline = time.monotonic() + seconds + GRACE
                    say(doing)
            process.send_signal(signal.SIGUSR1)  # it says where it is
            time.sleep(0.5)
            return None, findings.stuck(doing, seconds, _tail(said))
        finally:
            _end(process)
            os.close(ours)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the probe and all below it, those too that have left its group."""
    process.send_signal(signal.SIGSTOP)  # it shall start no more of them meanwhile
    family = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also whom a probe that died has left behind
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _tail(file: IO[bytes]) -> str:
    """What the probe, and whatever ran in it, printed last."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 10_000))
    return file.read().decode(errors="replace").strip()
