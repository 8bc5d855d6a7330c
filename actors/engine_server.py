"""One SGLang server, kept alive and kept current: `python -m argosy.actors engine CONFIG.json`.

Invariant: an engine is in the weight ledger only while it serves, and a version is confirmed only after SGLang itself
named it. A new version is loaded while generation is paused and running requests are retracted, so that each token's
log-probability belongs to the version it is labelled with. SGLang lives and dies with this process: the kernel kills it
when we die, we leave with the reason when it dies, and a janitor removes its temporary files even after `kill -9`.

It waits for the weight ledger (whoever publishes wakes it) and for SGLang (each call has a deadline).
"""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..buffer import RedisUnavailable, WeightLedger, WeightVersion
from . import checkpoints
from .errors import EngineFailed
from .settings import ActorConfig, EngineSettings
from .sglang_launch import die_with_parent

log = logging.getLogger(__name__)

PORTS = range(20000, 32768)
POLL_SECONDS = 1.0  # how late the death of SGLang may be noticed; weights wake us at once
LAST_LINES = 30
LAST_WORDS_SECONDS = 2.0  # for SGLang's helpers to tidy up after their server, and for Redis to hear that we left


class EngineServer:
    def __init__(self, config: ActorConfig) -> None:
        self.name = config.name
        self._settings = config.engine
        self._buffer = config.buffer
        self._ledger = WeightLedger(config.buffer)
        self._shapes = checkpoints.shapes(config.model)
        self._serving = WeightVersion(0, str(config.model), step=0, checksum="", created=0.0)
        self._sglang = Sglang(config.model, config.engine, config.run_dir / "engines" / f"{config.name}.log")
        self._stop_heartbeat = threading.Event()

    def run(self) -> None:
        """Serves until SIGTERM; EngineFailed when SGLang dies or cannot be trusted any more."""
        heartbeat = threading.Thread(target=self._heartbeat, daemon=True)
        try:
            self._sglang.start()
            newest = self._ledger.latest()
            if newest is not None:
                self._update(newest)
            self._ledger.register_engine(
                self.name, self._sglang.url, self._settings.ttl_seconds, version=self._serving.version
            )
            heartbeat.start()
            log.info("engine %s serves version %d at %s", self.name, self._serving.version, self._sglang.url)
            self._follow(tried=newest.version if newest else 0)
        finally:
            self._stop_heartbeat.set()
            self._sglang.stop()
            if heartbeat.is_alive():
                heartbeat.join(LAST_WORDS_SECONDS)
            self._unregister()

    def _follow(self, tried: int) -> None:
        while True:
            self._sglang.check_alive()
            weights = self._ledger.wait(after=tried, timeout=POLL_SECONDS)
            if weights is not None:
                tried = weights.version
                if self._update(weights):
                    self._ledger.confirm(self.name, weights.version)

    def _update(self, weights: WeightVersion) -> bool:
        """Loads a version and says whether it is served; one that cannot be loaded is reported and left out."""
        try:
            checkpoints.check(Path(weights.path), self._shapes)
        except EngineFailed as error:
            log.error("version %d is not loaded, %d stays: %s", weights.version, self._serving.version, error)
            return False
        with self._sglang.paused():
            try:
                self._sglang.load(weights)
            except EngineFailed as error:
                log.error("version %d failed to load, back to %d: %s", weights.version, self._serving.version, error)
                self._sglang.load(self._serving)  # some tensors may be new ones: all of the old, or this engine ends
                return False
        self._serving = weights
        return True

    def _heartbeat(self) -> None:
        ttl = self._settings.ttl_seconds
        while not self._stop_heartbeat.wait(ttl / 3):
            self._ledger.register_engine(self.name, self._sglang.url, ttl)

    def _unregister(self) -> None:
        ledger = WeightLedger(self._buffer.model_copy(update={"patience_seconds": LAST_WORDS_SECONDS}))
        try:
            ledger.unregister_engine(self.name)
        except RedisUnavailable as error:
            log.warning("engine %s could not say goodbye, its record expires by itself: %s", self.name, error)


class Sglang:
    """The server process and its HTTP interface."""

    def __init__(self, model: Path, settings: EngineSettings, log_file: Path) -> None:
        self._model = model
        self._settings = settings
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Starts SGLang and waits until it is healthy."""
        self._scratch = Path(tempfile.mkdtemp(prefix="argosy-engine-"))
        self._janitor = _hire_janitor(self._scratch)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        port = _free_port(self._settings.host)
        self.url = f"http://{self._settings.host}:{port}"
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "argosy.actors.sglang_launch", *self._arguments(port)],
                env=os.environ | self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + self._settings.start_seconds
        while not self._is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"SGLang is not healthy after {self._settings.start_seconds:.0f} s (engine.start_seconds); "
                    f"{self._log_file} ends with:\n{self._last_lines()}"
                )
            time.sleep(0.1)

    def check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise EngineFailed(f"SGLang ended with {code}; {self._log_file} ends with:\n{self._last_lines()}")

    def stop(self) -> None:
        """Ends every process of SGLang; it has nothing to save."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while _group_lives(self._process.pid):
            if time.monotonic() > deadline:
                os.killpg(self._process.pid, signal.SIGKILL)
                break
            time.sleep(0.02)
        shutil.rmtree(self._scratch)
        self._janitor.communicate()

    def load(self, weights: WeightVersion) -> None:
        """Loads weights and verifies that they are the ones served; to be called while paused."""
        version = str(weights.version)
        self._call(
            "update_weights_from_disk", {"model_path": weights.path, "weight_version": version, "flush_cache": True}
        )
        served = self._call("model_info")["weight_version"]
        if served != version:
            raise EngineFailed(f"SGLang serves version {served} after loading {version}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Running requests wait, and are prefilled again under the weights they find afterwards."""
        self._call("pause_generation", {"mode": "retract"})
        try:
            yield
        finally:
            self._call("continue_generation", {})

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._settings.update_seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"SGLang answered {path} with {error.code}: {error.read(2000).decode()}") from error
        except OSError as error:
            self.check_alive()
            raise EngineFailed(
                f"SGLang does not answer {path} within {self._settings.update_seconds} s: {error}"
            ) from error

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:  # refused or 503 while it starts
            return False

    def _arguments(self, port: int) -> list[str]:
        settings = self._settings
        named = {
            "model-path": self._model,
            "host": settings.host,
            "port": port,
            "dtype": settings.dtype,
            "weight-version": 0,
            "max-total-tokens": settings.max_total_tokens,
            "max-running-requests": settings.max_running_requests,
            "log-level": "warning",
        }
        # Without --sleep-on-idle an idle server burns a core; ids go in and out, so it needs no tokenizer.
        flags = ["--sleep-on-idle", "--skip-tokenizer-init"]
        return [
            *flags,
            *(part for name, value in named.items() for part in (f"--{name}", str(value))),
            *settings.arguments,
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "TMPDIR": str(self._scratch),
            "OMP_NUM_THREADS": str(self._settings.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def _last_lines(self) -> str:
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            return b"\n".join(file.read().splitlines()[-LAST_LINES:]).decode(errors="replace")


def _hire_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """A shell that removes `folder` when its standard input closes, which the kernel sees to when we die."""
    command = ["sh", "-c", 'cat; exec rm -rf -- "$1"', "argosy-janitor", str(folder)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


def _free_port(host: str) -> int:
    """One that nobody listens at. SGLang takes it half a minute later, so it is none of those (from 32768 on) that the
    system gives to whoever asks for any."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise EngineFailed(f"{host} has no free port among a hundred of {PORTS}")


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs; one that only waits for its parent to ask after it does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


def main(config: ActorConfig) -> None:
    def leave(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # leaving once is enough
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    EngineServer(config).run()
