"""The house keeps its order: which folder may know which, and what each needs installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_KNOW = {
    "buffer": set(),
    "envs": set(),
    "actors": {"envs", "buffer"},
    "learner": {"buffer"},
    "deploy": {"actors", "buffer", "envs", "learner"},
}
HEAVY = ("torch", "sglang", "megatron", "transformers", "tokenizers")
RUNS_WHAT_IT_READS = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
FORBIDDEN = {"buffer": (*HEAVY, *RUNS_WHAT_IT_READS), "envs": (*HEAVY, "redis")}


def imports_of(file: Path) -> set[str]:
    """Modules a file imports, those of Argosy as argosy.<folder>..."""
    package = ("argosy", *file.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            found.add(".".join([*base, *([node.module] if node.module else [])]))
            if node.level and not node.module:
                found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


@pytest.mark.parametrize("folder", MAY_KNOW)
def test_arrows_between_folders_go_one_way(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        for module in imports_of(file):
            name = module.split(".")
            if name[0] == "argosy" and len(name) > 1 and name[1] != folder:
                assert name[1] in MAY_KNOW[folder], f"{file.relative_to(ROOT)} imports {module}"
            assert name[0] not in FORBIDDEN.get(folder, ()), f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("folder", ["buffer", "envs", "actors", "learner", "deploy.cli"])
def test_the_public_face_needs_only_the_base_dependencies(folder: str) -> None:
    """`pip install .` alone is enough to write environments, read archives, and ask a run for its ledger."""
    blocked = f"import sys\nfor name in {HEAVY[:4]!r}: sys.modules[name] = None\nimport argosy.{folder}"
    ended = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("folder", ["buffer", "envs", "learner"])
def test_what_a_folder_names_as_its_public_face_exists(folder: str) -> None:
    ask = (
        f"import argosy.{folder} as f; [getattr(f, name) for name in f.__all__]; assert f.__all__ == sorted(f.__all__)"
    )
    ended = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
