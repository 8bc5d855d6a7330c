"""The shim says what it relies on: when upstream moves, these counts change before anything is silently wrong."""

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from argosy.learner import megatron_cpu
from argosy.learner.megatron_cpu import APPENDED, MODULE_RULES, RULES, UNTOUCHED

# What each rule matches in megatron-core 0.19.2. A new count needs a look at the new places, then a new number here.
MATCHES = {
    "stream wait": 2,
    "current device": 188,
    "device literal": 64,
    "synchronize": 103,
    "streams": 100,
    "tensor type": 9,
    "move to device": 19,
    "rng of a device": 1,
    "rng state": 3,
    "rng seed": 2,
    "pinned memory": 26,
}
# Places that change in the modules a dense model runs through.
CHANGED = {
    "megatron.core.distributed.distributed_data_parallel": 6,
    "megatron.core.distributed.param_and_grad_buffer": 8,
    "megatron.core.jit": 1,
    "megatron.core.models.common.embeddings.rotary_pos_embedding": 3,
    "megatron.core.optimizer.clip_grads": 6,
    "megatron.core.optimizer.distrib_optimizer": 9,
    "megatron.core.optimizer.optimizer": 11,
    "megatron.core.parallel_state": 5,
    "megatron.core.pipeline_parallel.p2p_communication": 8,
    "megatron.core.tensor_parallel.layers": 8,
    "megatron.core.tensor_parallel.random": 8,
}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    names = {
        ".".join(("megatron", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in (root / "core").rglob("*.py")
    }
    return {name: path.read_text() for name, path in names.items() if not name.startswith(UNTOUCHED)}


def test_every_rule_matches_what_it_was_written_for(sources: dict[str, str]) -> None:
    found = Counter[str]()
    for source in sources.values():
        for name, pattern, replacement in RULES:
            source, count = pattern.subn(replacement, source)
            found[name] += count
    assert dict(found) == MATCHES


def test_every_module_rule_matches_once_and_every_appended_module_exists(sources: dict[str, str]) -> None:
    for module, rules in MODULE_RULES.items():
        for old, _ in rules:
            assert sources[module].count(old) == 1, f"{module}: {old!r}"
    assert set(APPENDED) <= set(sources)


def test_the_modules_of_a_dense_model_change_where_expected(sources: dict[str, str]) -> None:
    assert {name: megatron_cpu.rewrite(name, sources[name])[1] for name in CHANGED} == CHANGED


def test_rewritten_modules_still_compile(sources: dict[str, str]) -> None:
    for name in CHANGED:
        compile(megatron_cpu.rewrite(name, sources[name])[0], name, "exec")


def test_nothing_happens_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    path = list(importlib.import_module("megatron").__path__)
    assert megatron_cpu._Finder().find_spec("megatron.core", path) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert megatron_cpu._Finder().find_spec("megatron.core", path) is None


def test_importing_the_package_or_its_settings_needs_no_torch() -> None:
    program = "import sys, argosy.learner, argosy.learner.settings; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_megatron_before_argosy_is_an_error_that_says_so() -> None:
    program = (
        "import sys, types\nsys.modules['megatron.core'] = types.ModuleType('megatron.core')\nimport argosy.learner\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "import argosy.learner first" in done.stderr


def test_only_megatron_core_is_touched() -> None:
    finder = megatron_cpu._Finder()
    for name in ("torch.cuda", "megatron", "megatron.corelike", "json", UNTOUCHED):
        assert finder.find_spec(name, None) is None


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = megatron_cpu._cache_folder()
    assert folder is not None and folder.is_relative_to(tmp_path)
    folder.chmod(0o777)
    assert megatron_cpu._cache_folder() is None
