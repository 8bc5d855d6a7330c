"""Lets Megatron-core train on a CPU over gloo: an import hook that rewrites CUDA literals in its sources as they load.

Invariant: where CUDA is available nothing happens, so a GPU host runs the package as it was published. Where it is not,
only modules below `megatron.core` are touched, in memory; no file of the package, no other package and no attribute of
torch changes (patching `torch.cuda` globally breaks `import transformers`). Each rule is the CPU twin of one CUDA
literal; a test counts what every rule matches, so an upstream change that makes a rule miss is seen at once.

Rewriting and compiling costs three seconds a process, so compiled code is cached below the user's own cache folder,
keyed by place, source, rules and interpreter. A cache folder that others could write to is never read.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import re
import stat
import sys
import types
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "megatron.core"
UNTOUCHED = "megatron.core.distributed.fsdp"  # never used on a CPU

# (what it is for, pattern, replacement), applied in this order to every module.
RULES: list[tuple[str, re.Pattern[str], str]] = [
    ("stream wait", re.compile(r"\btorch\.cuda\.current_stream\(\)\.synchronize\(\)"), "torch.cpu.synchronize()"),
    ("current device", re.compile(r"\btorch\.cuda\.current_device\(\)"), "torch.cpu.current_device()"),
    ("device literal", re.compile(r"""\bdevice\s*=\s*(["'])cuda\1"""), 'device="cpu"'),
    ("synchronize", re.compile(r"\btorch\.cuda\.(synchronize|current_stream)\("), r"torch.cpu.\1("),
    ("streams", re.compile(r"\btorch\.cuda\.(Stream|stream|Event)\("), r"torch.cpu.\1("),
    ("tensor type", re.compile(r"""(["'])torch\.cuda\.(Half|BFloat16|Float)Tensor\1"""), r"\1torch.\2Tensor\1"),
    ("move to device", re.compile(r"(?<!torch)\.cuda\((non_blocking=True)?\)"), ".cpu()"),
    ("rng of a device", re.compile(r"\btorch\.cuda\.random\.get_rng_state\(device=device\)"), "torch.get_rng_state()"),
    ("rng state", re.compile(r"\btorch\.cuda\.get_rng_state\(\)"), "torch.get_rng_state()"),
    ("rng seed", re.compile(r"\btorch\.cuda\.manual_seed\("), "torch.manual_seed("),
    ("pinned memory", re.compile(r"\bpin_memory\s*=\s*True"), "pin_memory=False"),
]

# Exact text in one module: what the general rules cannot say.
MODULE_RULES: dict[str, list[tuple[str, str]]] = {
    # torch.compile costs two seconds of import, needs a C++ compiler and wins nothing on these small fusions.
    "megatron.core.jit": [("            jit_fuser = torch.compile\n", "            jit_fuser = noop_decorator\n")],
    "megatron.core.transformer.moe.router": [("    @torch.compile\n", "")],
    # torch.cpu.Stream.record_event() returns None.
    "megatron.core.transformer.moe.token_dispatcher": [
        ("self.cuda_dtoh_stream.record_event()", "torch.cpu.Event()"),
    ],
    # The persistent checkpoint worker would hang for ever.
    "megatron.core.dist_checkpointing.strategies.async_utils": [
        ("torch.cuda.set_device(rank % torch.cuda.device_count())", "pass"),
    ],
    # With torch's AdamW (no TransformerEngine, no Apex) 'step' is a tensor in the state but not in what is loaded.
    "megatron.core.optimizer.distrib_optimizer": [
        (
            "                if isinstance(v, torch.Tensor):\n                    dst_tensors[k] = v",
            "                if isinstance(v, torch.Tensor) and k != 'step':\n                    dst_tensors[k] = v",
        ),
    ],
    # Splits must still become numpy for all_to_all_single when the tensor already lives on the CPU.
    "megatron.core.transformer.moe.moe_utils": [
        (
            "    if torch.is_tensor(tensor) and tensor.is_cuda:",
            "    if torch.is_tensor(tensor) and not tensor.is_cuda:\n"
            "        tensor = tensor.numpy() if as_numpy else tensor\n"
            "    elif torch.is_tensor(tensor):",
        ),
    ],
}

# Text added to the end of one module.
APPENDED: dict[str, str] = {
    "megatron.core.tensor_parallel.random": (
        "\n\ndef _set_cuda_rng_state(new_state, device=-1, graph_safe=False):\n    torch.set_rng_state(new_state)\n"
    ),
}


def rewrite(name: str, source: str) -> tuple[str, int]:
    """Returns the CPU twin of module `name`'s source and how many places changed (0: the source is returned as is)."""
    changed = 0
    for _, pattern, replacement in RULES:
        source, count = pattern.subn(replacement, source)
        changed += count
    for old, new in MODULE_RULES.get(name, ()):
        changed += source.count(old)
        source = source.replace(old, new)
    if name in APPENDED:
        changed += 1
        source += APPENDED[name]
    return source, changed


def install() -> None:
    """Puts the hook in place; call it before the first `import megatron.core`. Costs nothing, torch is not imported.

    Raises RuntimeError when megatron.core is already loaded without the hook in a process that has no CUDA, because it
    would then fail much later and far from the cause.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules and not _cuda():
        raise RuntimeError("megatron.core was imported before argosy.learner: import argosy.learner first")
    sys.meta_path.insert(0, _Finder())


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class _Finder(importlib.abc.MetaPathFinder):
    _active: bool | None = None  # whether sources are rewritten; known at the first import of megatron.core

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (name + ".").startswith(PACKAGE + ".") or name.startswith(UNTOUCHED):
            return None
        if self._active is None:
            self._active = not _cuda()
            if self._active:
                _stand_in_for_triton()
        if not self._active:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _stand_in_for_triton() -> None:
    """One MoE module that is never run on a CPU imports triton; without it nothing of Megatron could be imported."""
    if importlib.util.find_spec("triton") is None:
        kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        vars(kernels).update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
        sys.modules[kernels.__name__] = kernels


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        data = self.get_data(self.path)
        cache = _cache_folder()
        rules = (self.path, RULES, MODULE_RULES.get(fullname), APPENDED.get(fullname), sys.version)
        entry = cache / hashlib.sha256(data + repr(rules).encode()).hexdigest() if cache else None
        if entry is not None and entry.exists():
            return marshal.loads(entry.read_bytes())
        source, _ = rewrite(fullname, data.decode())
        code = compile(source, self.path, "exec", dont_inherit=True)
        if entry is not None:
            unfinished = entry.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(marshal.dumps(code))
            unfinished.replace(entry)
        return code


def _cache_folder() -> Path | None:
    """The folder of compiled code, or None where no folder exists that only this user can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy" / "megatron_cpu"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:  # a read-only or missing home: compile each time
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if private and os.access(folder, os.W_OK) else None
