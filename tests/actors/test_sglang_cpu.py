"""What the import shims rely on upstream. When one of these fails after an upgrade, look at the shim before the pin."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest
from argosy.actors import sglang_cpu


def run(code: str, *, shims: bool) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with or without the shims."""
    install = "from argosy.actors import sglang_cpu; sglang_cpu.install()\n" if shims else ""
    return subprocess.run([sys.executable, "-c", install + code], capture_output=True, text=True, timeout=100)


def test_the_shims_were_proven_with_the_installed_release():
    assert importlib.metadata.version("sglang") == sglang_cpu.SGLANG_VERSION


def test_torchvision_still_needs_the_shim():
    """Where torchvision's wheel fits its torch (a CPU build of both), the shim has nothing to do and does no harm."""
    without = run("import torchvision", shims=False)
    if without.returncode:
        assert "torchvision/_meta_registrations.py" in without.stderr, without.stderr


def test_sglang_still_has_what_the_shims_take_hold_of():
    """The kernel that stands in is the one it calls, and its load snapshots are named where we move them."""
    code = """
import inspect, os, sgl_kernel, torchvision
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.mem_cache import allocation
assert "assign_req_to_token_pool_cpu(" in inspect.getsource(allocation)
assert allocation.assign_req_to_token_pool_cpu is sgl_kernel.assign_req_to_token_pool_cpu
from sglang.srt.managers import load_snapshot
assert load_snapshot.shm_path_for("x").startswith("/dev/shm/")
assert "shm_path_for(" in inspect.getsource(load_snapshot.create_load_snapshot_writer)
from argosy.actors.sglang_launch import keep_to_tmpdir
keep_to_tmpdir()
assert not load_snapshot.shm_path_for("x").startswith("/dev/shm/")
"""
    done = run(code, shims=True)
    assert done.returncode == 0, done.stderr


def test_the_kernel_writes_each_requests_slots_into_its_row(monkeypatch):
    monkeypatch.syspath_prepend(str(inspect.getfile(sglang_cpu)).removesuffix("/__init__.py"))
    torch = pytest.importorskip("torch")
    import sgl_kernel

    table = torch.zeros((3, 5), dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 5
    )
    assert table.tolist() == [[9, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]]
    with pytest.raises(NotImplementedError, match="other_cpu"):
        sgl_kernel.other_cpu()
    assert not hasattr(sgl_kernel, "anything_else")
