"""Services shared by every test: they are real, and started once."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

# Without root, redis-server and bwrap are installed beside the interpreter.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real redis-server with an append-only file, on a unix socket of its own."""
    server = shutil.which("redis-server")
    assert server, "redis-server is missing: run `make install`"
    folder = Path(tempfile.mkdtemp(prefix="argosy-test-redis-"))
    socket = folder / "redis.sock"
    command = [server, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--appendonly", "yes"]
    process = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        deadline = time.monotonic() + 20
        while not (socket.exists() and client.ping()):
            assert time.monotonic() < deadline, f"redis-server did not answer on {socket} within 20 s"
            time.sleep(0.02)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder)


@pytest.fixture
def run_name() -> str:
    """A run of its own for each test, so that tests can share one Redis."""
    return f"test-{uuid.uuid4().hex[:8]}"
