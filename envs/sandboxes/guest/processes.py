"""Starting children, waiting for them, and ending them.

Invariant: a deadline and the memory limit are kept by killing *every* other process of the namespace, which no setsid
or double fork escapes; when `supervise` says "timeout" or "oom", none of them is left.
"""

# ruff: noqa: PTH123, PTH208, SIM105

import os
import resource
import select
import signal
import time

TICK = 0.025  # seconds between two looks at memory: a fast writer fills some 50 MB meanwhile
IDLE_TICK = 5.0  # the same while nothing of others should be running
NULL = os.open("/dev/null", os.O_RDWR)
OWNER = 0  # the descriptor of the conversation
_MOST_ABANDONED = 64

abandoned: list[int] = []
"""Reading ends of pipes that only background processes can still hold: drained, so that these do not block or die."""


def spawn(limits, output, work, keep=(), **more):
    """Fork a child with descriptors 0, 1, 2 (`output` is 1 and 2) and `keep` (number there, ours), nothing else.

    `work` is called in it; `more` are further limits.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(NULL, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number, ours in keep:
            os.dup2(ours, number)
        following = 3
        for number in sorted(number for number, _ in keep):
            os.closerange(following, number)
            following = number + 1
        os.closerange(following, 65536)
        restrain(limits, **more)
        work()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def restrain(limits, **more):
    """Limits that the kernel keeps per process; total memory is watched in `supervise`."""
    wanted = {
        "CORE": 0,
        "DATA": 2 * limits["memory"],  # above the watched total, so that `oom` is told apart from a failed malloc
        "FSIZE": limits["file_size"],
        "MSGQUEUE": 0,  # would outlive a reset
        "NOFILE": 1024,
        "NPROC": limits["processes"],
        **more,
    }
    for name, value in wanted.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect the default
        signal.signal(number, signal.SIG_DFL)


def supervise(pid, ended, pipe, seconds, memory, sink, report=None, reported=None):
    """Feed `sink` from `pipe` until the child ends, or until `reported` is true of a chunk from `report`.

    `ended` is the child's pidfd. Returns its wait status (None while it lives) and why we ended it: None, "timeout" or
    "oom". A background process that holds the pipe delays nothing.
    """
    deadline = time.monotonic() + seconds
    look = time.monotonic() + TICK
    poll = select.poll()
    for fd in (ended, pipe, *abandoned):
        poll.register(fd, select.POLLIN)
    if report is not None:
        poll.register(report, select.POLLIN)
    poll.register(OWNER, 0)  # only a hang-up: the owner is gone
    reason, alive, running = None, True, True
    while running:
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
            if fd == OWNER:
                os._exit(0)
            elif fd == ended:
                alive = running = False
            elif fd == report:
                chunk = os.read(report, 4096)
                if not chunk:  # the shell has become another program
                    poll.unregister(report)
                elif reported(chunk):
                    running = False
            elif fd == pipe:
                chunk = os.read(pipe, 1 << 16)
                if chunk:
                    sink(chunk)
                else:
                    poll.unregister(pipe)
            elif not os.read(fd, 1 << 16):
                poll.unregister(fd)
                forget(fd)
    if reason is not None:
        kill_all_others()
    status = os.waitpid(pid, 0)[1] if reason is not None or not alive else None
    if status is not None:
        reap(wait=reason is not None)  # the killed ones must be gone when the caller hears of it
    drain(pipe, sink)
    return status, reason


def wait_for_request(memory, pipe, expected):
    """Until the owner sends something: what was left in the background may not outgrow its limit meanwhile.

    `pipe` (or None) is where it writes; `expected` is how many processes are there when nothing is in the background.
    """
    poll = select.poll()
    for fd in (OWNER, *abandoned, *([] if pipe is None else [pipe])):
        poll.register(fd, select.POLLIN)
    busy = True  # perhaps; the first look is a tick later, by when the next request is often there
    while True:
        for fd, _ in poll.poll((TICK if busy else IDLE_TICK) * 1000):
            if fd == OWNER:
                return
            if not os.read(fd, 1 << 16):
                poll.unregister(fd)
                forget(fd)
        reap()
        busy = len(others()) > expected
        if busy and too_much(memory):
            kill_all_others()
            reap(wait=True)


def abandon(pipe):
    """Nobody reads this pipe any more."""
    abandoned.append(pipe)
    if len(abandoned) > _MOST_ABANDONED:
        forget(abandoned[0])


def forget(pipe):
    if pipe in abandoned:
        abandoned.remove(pipe)
        os.close(pipe)


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


def others():
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"]


def too_much(memory):
    """The quick sum counts shared pages once for each who shares them, so it is only a reason to look closer."""
    return memory_used() > memory and memory_used(exact=True) > memory


def memory_used(exact=False):
    """Bytes held by all other processes."""
    total = 0
    for pid in others():
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
