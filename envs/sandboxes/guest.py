"""The program inside a sandbox: process 1 of its own pid namespace, served over stdin and stdout.

Frame, both ways: two big-endian u32 lengths, a JSON header, raw bytes. One request at a time: run, python, write,
read, reset. The owner is `sandbox.py`. Standard library only and no import of argosy: this file is copied into the
sandbox and run by whatever `python3` (>= 3.9) is there.

Invariant: code of others runs only in children, which hold none of this program's descriptors and cannot trace it
(not dumpable) or signal it (process 1). Children share its user id, so they could still lower its limits: then it
dies, or `reset` notices, and either way the owner throws the sandbox away. A deadline is kept by killing *every* other
process of the namespace, which no setsid or double fork escapes. When the owner goes away, so does this program, and
with process 1 the kernel ends all others.
"""

# Only the imports below: every fork pays for them.
# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH110, PTH118, PTH120, PTH123, PTH208, SIM105

import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
import types

WORKSPACE = "/workspace"
SCRATCH = {WORKSPACE: 0o755, "/tmp": 0o1777, "/dev/shm": 0o1777}
LENGTHS = struct.Struct(">II")
TICK = 0.025  # seconds between two looks at memory: a fast writer fills some 50 MB meanwhile
PATH = "/usr/local/bin:/usr/bin:/bin:" + os.path.dirname(sys.executable)
ENVIRONMENT = {"PATH": PATH, "HOME": WORKSPACE, "LANG": "C.UTF-8", "PWD": WORKSPACE}
PR_SET_DUMPABLE = 4
LIBC = ctypes.CDLL(None)
NULL = os.open("/dev/null", os.O_RDWR)
LIMIT_KINDS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


# Running things.


def spawn(limits, seconds, output, work):
    """Fork a child whose descriptors are 0, 1, 2 and nothing else (`output` is 1 and 2), and call `work` in it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(NULL, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 65536)
        restrain(limits, seconds)
        os.chdir(WORKSPACE)
        work()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def restrain(limits, seconds):
    """Limits that the kernel keeps per process; total memory is watched in `supervise`."""
    for name, value in (
        ("CORE", 0),
        ("CPU", int(seconds) + 2),
        ("DATA", 2 * limits["memory"]),  # above the watched total, so that `oom` is told apart from a failed malloc
        ("FSIZE", limits["file_size"]),
        ("MSGQUEUE", 0),  # would outlive a reset
        ("NOFILE", 1024),
        ("NPROC", limits["processes"]),
    ):
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect the default
        signal.signal(number, signal.SIG_DFL)


def supervise(pid, pipe, seconds, memory, sink):
    """Feed `sink` until the child has ended; a background process that holds the pipe delays nothing.

    Returns the wait status and why we ended it: None, "timeout" or "oom". Nothing it started survives the last two.
    """
    deadline = time.monotonic() + seconds
    look = time.monotonic() + TICK
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    poll.register(0, 0)  # only a hang-up: the owner is gone
    reason, alive = None, True
    while alive:
        now = time.monotonic()
        if now >= deadline:
            reason = "timeout"
            break
        if now >= look:
            look = now + TICK
            reap(spare=pid)
            if too_much(memory):
                reason = "oom"
                break
        for fd, _ in poll.poll((min(deadline, look) - now) * 1000):
            if fd == 0:
                os._exit(0)
            elif fd == ended:
                alive = False
            else:
                chunk = os.read(pipe, 1 << 16)
                if chunk:
                    sink(chunk)
                else:
                    poll.unregister(pipe)
    os.close(ended)
    if reason is not None:
        kill_all_others()
    _, status = os.waitpid(pid, 0)
    reap(wait=reason is not None)  # the killed ones must be gone when the caller hears of it
    drain(pipe, sink)
    return status, reason


def drain(pipe, sink):
    """What is in the pipe now, and no more than a pipe can hold."""
    os.set_blocking(pipe, False)
    for _ in range(16):
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            return
        sink(chunk)


def kill_all_others():
    """Every process of this namespace but ourselves; the kernel lets none of them fork meanwhile."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reap(spare=None, wait=False):
    """Orphans end up with process 1: collect all that have ended, up to `spare`; with `wait`, all there are."""
    how = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, how)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == spare:
            return
        os.waitpid(ended.si_pid, 0)


def too_much(memory):
    """The quick sum counts shared pages once for each who shares them, so it is only a reason to look closer."""
    return memory_used() > memory and memory_used(exact=True) > memory


def memory_used(exact=False):
    """Bytes held by all other processes."""
    total = 0
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1":
            try:
                total += proportional(pid) if exact else resident(pid)
            except (FileNotFoundError, ProcessLookupError):
                pass  # it ended while we looked
    return total


def resident(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def proportional(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except PermissionError:  # a process that hides its memory pays the full price
        return resident(pid)


class HeadAndTail:
    """The first and the last half of the allowance; what lies between is counted and let go."""

    def __init__(self, allowance):
        self.half = allowance // 2
        self.head, self.tail, self.size = bytearray(), bytearray(), 0

    def add(self, chunk):
        self.size += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if len(self.tail) > 4 * self.half:
            del self.tail[: -self.half]

    def result(self):
        cut = self.size - len(self.head) - min(len(self.tail), self.half)
        if not cut:
            return bytes(self.head + self.tail), False
        return b"".join((self.head, b"\n... [%d bytes cut] ...\n" % cut, self.tail[-self.half :])), True


# Requests: each takes (limits, header, body) and returns (header, body).


def run(limits, request, body):
    """A shell command in the workspace. Its background processes live on until a deadline, `python` or `reset`."""
    output = HeadAndTail(limits["output"])
    reader, writer = os.pipe()
    command = os.fsdecode(body)
    pid = spawn(limits, request["seconds"], writer, lambda: os.execve(SHELL, [SHELL, "-c", command], ENVIRONMENT))
    os.close(writer)
    status, reason = supervise(pid, reader, request["seconds"], limits["memory"], output.add)
    os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and reason is None:
        reason = "killed"
    text, truncated = output.result()
    return {"exit": code if code >= 0 else 128 - code, "truncated": truncated, "reason": reason}, text


def python(limits, request, body):
    """Call a function on each list of arguments, in a fork of this warm interpreter.

    One JSON line [value, error] per call comes back through a pipe. Code could write such lines itself, but that is no
    more than returning the values: the answers are checked elsewhere, and lines beyond the calls are dropped.
    """
    received = bytearray()
    allowance = limits["output"]

    def keep(chunk):
        received.extend(chunk[: allowance - len(received)])

    reader, writer = os.pipe()
    pid = spawn(limits, request["seconds"], writer, lambda: call_python(request, allowance))
    os.close(writer)
    status, reason = supervise(pid, reader, request["seconds"], limits["memory"], keep)
    os.close(reader)
    kill_all_others()
    reap(wait=True)
    if reason is None and os.WIFSIGNALED(status):
        reason = signal.Signals(os.WTERMSIG(status)).name
    lines = bytes(received).split(b"\n")[:-1]  # what follows the last newline is an unfinished line
    full = len(received) >= allowance
    return {"reason": "output" if full and reason is None else reason}, b"\n".join(lines[: len(request["arguments"])])


def call_python(request, allowance):
    """The child of `python`: ends by os._exit, so that nothing of this program runs twice."""
    LIBC.prctl(PR_SET_DUMPABLE, 1)  # so that its memory can be measured exactly
    os.dup2(1, 3)
    os.dup2(0, 1)
    os.dup2(0, 2)
    sys.path.insert(0, WORKSPACE)

    def answer(value, error=None):
        line = json.dumps([value, error]).encode() + b"\n"
        if len(line) > allowance:
            line = json.dumps([None, f"OutputTooLarge: more than {allowance} bytes"]).encode() + b"\n"
        while line:
            line = line[os.write(3, line) :]

    try:
        for name, text in request["files"].items():
            store(name, text.encode())
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        exec(compile(request["source"], "solution.py", "exec"), module.__dict__)
        function = getattr(module, request["function"])
    except BaseException as error:
        for _ in request["arguments"]:
            answer(None, describe(error))
        os._exit(0)
    for arguments in request["arguments"]:
        try:
            answer(function(*arguments))
        except BaseException as error:
            answer(None, describe(error))
    os._exit(0)


def describe(error):
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__


def write(limits, request, body):
    try:
        store(request["path"], body)
    except (OSError, ValueError) as error:
        return refusal(error)
    return {}, b""


def read(limits, request, body):
    try:
        return {}, load(request["path"], limits["file_size"])
    except (OSError, ValueError) as error:
        return refusal(error)


def refusal(error):
    """For the owner to raise; ValueError is a path with a NUL or a lone surrogate."""
    code, message = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EINVAL, str(error))
    return {"errno": code, "message": message}, b""


def load(path, most):
    """A regular file of bounded size; anything else (a fifo would block us) is refused."""
    fd = os.open(os.path.join(WORKSPACE, path), os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes")
    return content


def store(path, content):
    path = os.path.join(WORKSPACE, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    with open(fd, "wb") as file:
        file.write(content)


def reset(limits, request, body):
    """Back to the state at start; `clean` is False where that cannot be, and the owner throws this sandbox away."""
    kill_all_others()
    reap(wait=True)
    try:
        for folder, mode in SCRATCH.items():
            os.chmod(folder, mode)
            wipe(folder)
    except (OSError, RecursionError):
        return {"clean": False}, b""
    return {"clean": state() == INITIAL}, b""


def wipe(folder):
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            wipe(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def state():
    """What a child of the same user could have changed in us or left in the kernel."""
    found: list = [resource.getrlimit(kind) for kind in LIMIT_KINDS]
    found += [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)]
    for name in ("shm", "sem", "msg"):
        with open("/proc/sysvipc/" + name) as file:
            found.append(len(file.readlines()))
    return found


# The conversation.


def watch_background(memory):
    """Until the next request comes: what `run` left in the background may not outgrow its limit meanwhile."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while has_children() and not poll.poll(TICK * 1000):
        reap()
        if too_much(memory):
            kill_all_others()
            reap(wait=True)


def has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def receive():
    lengths = read_exactly(LENGTHS.size)
    header_size, body_size = LENGTHS.unpack(lengths)
    return json.loads(read_exactly(header_size)), read_exactly(body_size)


def read_exactly(size):
    parts = []
    while size:
        chunk = os.read(0, min(size, 1 << 20))
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


def serve(limits):
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores what it does not handle
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine runs out of memory, this goes before the trainer
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    exec(compile("def f(x):\n    return [x]\n", "warm", "exec"), {})  # an interpreter's first compile takes 1 ms more
    gc.freeze()  # children copy fewer pages
    send({"pid": os.getpid(), "python": sys.version.split()[0]})
    requests = {"run": run, "python": python, "write": write, "read": read, "reset": reset}
    while True:
        watch_background(limits["memory"])
        request, body = receive()
        send(*requests[request["do"]](limits, request, body))  # an exception here means we are broken: die


INITIAL = None

if __name__ == "__main__":
    INITIAL = state()
    serve(json.loads(sys.argv[1]))
