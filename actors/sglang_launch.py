"""Starts SGLang: `python -m argosy.actors.sglang_launch SGLANG-ARGUMENTS`, run by the engine server.

Every process SGLang spawns imports this module again before anything else, which makes it the place for what must hold
in all of them: a process dies with its parent (so `kill -9` of any of them leaves no other behind), nothing is
written outside TMPDIR (which the engine server removes), and without CUDA the import shims are in place.
"""

import ctypes
import os
import signal
import sys
import tempfile

PR_SET_PDEATHSIG = 1
ON_CPU = "SGLANG_USE_CPU_ENGINE"
CPU_ARGUMENTS = [
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "xgrammar"),
]


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies; leaves at once if its server is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(os.getsid(0), 0)  # the engine server makes SGLang's first process the leader of a session
    except ProcessLookupError:
        os._exit(1)


def keep_to_tmpdir() -> None:
    """Moves SGLang's load snapshots from /dev/shm, where a killed server would leave them, to TMPDIR."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: f"{tempfile.gettempdir()}/loads-{name}"


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that SGLang spawns
    die_with_parent()
    if __name__ == "__main__":
        import torch

        if not torch.cuda.is_available():
            os.environ[ON_CPU] = "1"
            sys.argv[1:1] = CPU_ARGUMENTS  # first, so that what the user passes wins
    if os.environ.get(ON_CPU) == "1":
        from .sglang_cpu import install

        install()
    keep_to_tmpdir()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
