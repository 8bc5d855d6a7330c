"""The conversation with the owner, one request at a time.

Frame, both ways: two big-endian u32 lengths, a JSON header, raw bytes; an answer whose header has "more" goes on in the
next frame. The owner is `bubblewrap.py`. An exception that no request expects means that we are broken: we die of it.
"""

# ruff: noqa: PTH118, PTH120, PTH123

import errno
import gc
import json
import os
import resource
import signal
import struct
import sys

from . import files
from .calls import LIBC, PR_SET_DUMPABLE, python
from .output import HeadAndTail
from .processes import OWNER, kill_all_others, reap, wait_for_request
from .shell import Shell

LENGTHS = struct.Struct(">II")
PATH = "/usr/local/bin:/usr/bin:/bin:" + os.path.dirname(sys.executable)
LIMIT_KINDS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Guest:
    """Its public methods are the requests: (header, body) -> (header, body)."""

    def __init__(self, config):
        self._config, self._limits, self._workdir = config, config["limits"], config["workdir"]
        environment = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "USER": "agent", **config["environment"]}
        self._shell = Shell(self._limits, self._workdir, environment)
        self._at_start = state()

    def run(self, request, command):
        output = HeadAndTail(self._limits["output"])
        if request["fresh"]:
            self._shell.end()
        code, reason = self._shell.run(command, request["seconds"], output.add)
        text, truncated = output.result()
        return {"exit": code, "truncated": truncated, "reason": reason}, text

    def python(self, request, body):
        return python(self._config, request)

    def write(self, request, content):
        files.store(self._path(request), content, request["executable"])
        return {}, b""

    def read(self, request, body):
        return {}, files.load(self._path(request), self._limits["file_size"])

    def snapshot(self, request, body):
        most = self._limits["disk"]
        files.take(self._workdir, request["paths"], request["exclude"], most, lambda part: send({"more": 1}, part))
        return {}, b""

    def restore(self, request, tar):
        files.put(self._workdir, tar)
        return {}, b""

    def reset(self, request, body):
        """`clean` is False where the state at start cannot be had again; the owner throws this sandbox away."""
        kill_all_others()
        reap(wait=True)
        try:
            files.clear(self._workdir)
        except (OSError, RecursionError):
            return {"clean": False}, b""
        return {"clean": state() == self._at_start}, b""

    def answer(self, header, body):
        request = getattr(self, header["do"])
        if header["do"] not in ("read", "write", "snapshot", "restore"):
            return request(header, body)
        try:
            return request(header, body)
        except OSError as error:
            code, message = error.errno, error.strerror
        except (ValueError, RecursionError) as error:  # a path with a NUL or a lone surrogate, or too deep
            code, message = errno.EINVAL, str(error)
        return {"errno": code, "message": message}, b""

    def serve(self):
        while True:
            wait_for_request(self._limits["memory"], self._shell.output, expected=self._shell.pid is not None)
            send(*self.answer(*receive()))

    def _path(self, request):
        return os.path.join(self._workdir, request["path"])


def state():
    """What a child of the same user could have changed in us or left in the kernel."""
    found: list = [resource.getrlimit(kind) for kind in LIMIT_KINDS]
    found += [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)]
    for name in ("shm", "sem", "msg"):
        with open("/proc/sysvipc/" + name) as file:
            found.append(len(file.readlines()))
    return found


def receive():
    header_size, body_size = LENGTHS.unpack(read_exactly(LENGTHS.size))
    return json.loads(read_exactly(header_size)), read_exactly(body_size)


def read_exactly(size):
    parts = []
    while size:
        chunk = os.read(OWNER, min(size, 1 << 20))
        if not chunk:
            os._exit(0)  # the owner closed its end
        parts.append(chunk)
        size -= len(chunk)
    return b"".join(parts)


def send(header, body=b""):
    encoded = json.dumps(header).encode()
    data = memoryview(LENGTHS.pack(len(encoded), len(body)) + encoded + body)
    while data:
        data = data[os.write(1, data) :]


def open_proxy(passage, port):
    """Listen where http_proxy points, and give the listening socket to the owner, who has the way out."""
    import socket  # 4 ms, for few

    with socket.socket() as listener, socket.socket(fileno=passage) as owner:
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        socket.send_fds(owner, [b"proxy"], [listener.fileno()])


def main():
    config = json.loads(sys.argv[1])
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores what it does not handle
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine runs out of memory, this goes before the trainer
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    files.furnish(config["workdir"])
    if config["proxy"] is not None:
        open_proxy(*config["proxy"])
    if config["processors"] is not None:  # a control group keeps it exactly, where there is one
        possible = sorted(os.sched_getaffinity(0))
        first = int.from_bytes(os.urandom(2), "big")
        os.sched_setaffinity(0, {possible[(first + i) % len(possible)] for i in range(config["processors"])})
    guest = Guest(config)
    exec(compile("def f(x):\n    return [x]\n", "warm", "exec"), {})  # an interpreter's first compile takes 1 ms more
    gc.freeze()  # children copy fewer pages
    send({"pid": os.getpid(), "python": sys.version.split()[0]})
    guest.serve()
