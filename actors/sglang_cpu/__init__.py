"""What SGLang needs beside it on a machine without CUDA: two import shims, installed by `sglang_launch` alone.

Invariant: nothing of SGLang, torch or torchvision is changed. `sgl_kernel` stands in for the kernel package, whose
wheel needs CUDA; torchvision's wheel, built against a CUDA torch, is let in beside a CPU torch by leaving out the one
module of it that registers shape functions for C++ operators it could not load. tests/actors/test_sglang_cpu.py fails
when an upgrade changes what these two rely on.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SGLANG_VERSION = "0.5.23"  # the release these shims were proven with


class _LeaveOut(MetaPathFinder, Loader):
    """Imports one module as an empty one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Makes `import sglang` work in this process; call it before anything imports torchvision."""
    sys.meta_path.insert(0, _LeaveOut("torchvision._meta_registrations"))
    sys.path.insert(0, str(Path(__file__).parent))  # where `import sgl_kernel` finds the stand-in
