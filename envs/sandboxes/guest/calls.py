"""Calling a Python function on lists of arguments, in a fork of this warm interpreter.

Invariant: one JSON line [value, error] per call comes back through a pipe, and never more lines than calls. Code could
write such lines itself, but that is no more than returning the values: the answers are checked elsewhere.
"""

# ruff: noqa: PTH118

import ctypes
import json
import os
import signal
import sys
import types

from .files import store
from .processes import kill_all_others, reap, spawn, supervise

PR_SET_DUMPABLE = 4
LIBC = ctypes.CDLL(None)


def python(config, request):
    """Whatever else runs in the sandbox is killed."""
    limits, received = config["limits"], bytearray()
    allowance = limits["output"]

    def keep(chunk):
        received.extend(chunk[: allowance - len(received)])

    reader, writer = os.pipe()
    work = lambda: call(config["workdir"], request, allowance)  # noqa: E731
    pid = spawn(limits, writer, work, CPU=int(request["seconds"]) + 2)
    os.close(writer)
    ended = os.pidfd_open(pid)
    status, reason = supervise(pid, ended, reader, request["seconds"], limits["memory"], keep)
    os.close(ended)
    os.close(reader)
    kill_all_others()
    reap(wait=True)
    if reason is None and os.WIFSIGNALED(status):
        reason = signal.Signals(os.WTERMSIG(status)).name
    lines = bytes(received).split(b"\n")[:-1]  # what follows the last newline is an unfinished line
    full = len(received) >= allowance
    return {"reason": "output" if full and reason is None else reason}, b"\n".join(lines[: len(request["arguments"])])


def call(folder, request, allowance):
    """The child of `python`: ends by os._exit, so that nothing of this program runs twice."""
    LIBC.prctl(PR_SET_DUMPABLE, 1)  # so that its memory can be measured exactly
    os.dup2(1, 3)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.chdir(folder)
    sys.path.insert(0, folder)

    def answer(value, error=None):
        line = json.dumps([value, error]).encode() + b"\n"
        if len(line) > allowance:
            line = json.dumps([None, f"OutputTooLarge: more than {allowance} bytes"]).encode() + b"\n"
        while line:
            line = line[os.write(3, line) :]

    try:
        for name, text in request["files"].items():
            store(os.path.join(folder, name), text.encode())
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
