"""What of an agent's files is carried into grading, decided on archives alone."""

import io
import tarfile
from typing import Any

from argosy.envs.grading.work import difference, matches
from argosy.envs.tasks import Grading, Stage

GIVEN = {
    "main.py": "given",
    "old.py": "given",
    "tests/test_old.py": "given",
    "conftest.py": "given",
    "setup.cfg": "[metadata]\nname = x\n[tool:pytest]\naddopts = -q\n",
    "package.json": '{"name": "x", "scripts": {"test": "jest"}}',
    "data/link": ("link", "../main.py"),
}

KINDS = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE, "dir": tarfile.DIRTYPE}


def archive(files: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                kinds = {
                    "link": tarfile.SYMTYPE,
                    "hard": tarfile.LNKTYPE,
                    "fifo": tarfile.FIFOTYPE,
                    "dir": tarfile.DIRTYPE,
                }
                member.type, member.linkname = kinds[content[0]], content[1]
                tar.addfile(member)
            else:
                member.size = len(content.encode())
                tar.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


def carried(changes: dict[str, Any], **grading: Any) -> tuple[set[str], set[str], set[str]]:
    """Written, removed and left out, relative to the workdir; a change to None removes."""
    made = {name: content for name, content in {**GIVEN, **changes}.items() if content is not None}
    stage = Stage("", Grading("true", **grading))
    work = difference(archive(made), archive(GIVEN), stage, "/w")
    with tarfile.open(fileobj=io.BytesIO(work.archive("/w"))) as tar:
        assert {name.removeprefix("/w/") for name in work.written} == set(tar.getnames())
    return tuple({path.removeprefix("/w/") for path in paths} for paths in (work.written, work.removed, work.left_out))  # type: ignore


def test_changes_are_carried_and_nothing_else() -> None:
    new = {"main.py": "mine", "src/new.py": "mine", "src": ("dir", ""), "old.py": None, "hard.py": ("hard", "main.py")}
    assert carried(new) == ({"main.py", "src/new.py", "src", "hard.py"}, {"old.py"}, set())
    assert carried({}) == (set(), set(), set())
    assert carried({"fifo": ("fifo", ""), "../up.py": "x", "/etc/passwd": "x"}) == (
        set(),
        set(),
        {"/up.py", "/etc/passwd"},
    )
    assert carried({"main.py": "mine", "other.py": "mine"}, artefacts=("main.py",))[0] == {"main.py"}


def test_what_judges_is_not() -> None:
    for name in (
        "conftest.py", "src/conftest.py", "pytest.ini", "sitecustomize.py", "src/usercustomize.py", "pytest.py",
        "src/unittest/__init__.py", "__pycache__/main.cpython-311.pyc", "x.pyc", ".git/config", ".venv/bin/python3",
        ".venv/lib/python3.11/site-packages/_pytest/runner.py", ".venv/lib/python3.11/site-packages/x.pth",
    ):  # fmt: skip
        assert carried({name: "mine"}) == (set(), set(), {name}), name
    assert carried({"model.pth": "weights", "src/mine/pytester.py": "x"})[0] == {"model.pth", "src/mine/pytester.py"}
    assert carried({"tests/test_old.py": None, "conftest.py": None}, protected=("tests/**",)) == (
        set(),
        set(),
        {"tests/test_old.py", "conftest.py"},
    )
    assert carried({"tests/test_new.py": "x"}, protected=("**/test_*.py",))[2] == {"tests/test_new.py"}
    assert carried({"check.py": "x"}, files={"check.py": b""})[2] == {"check.py"}
    assert carried({"tests": ("link", "/tmp"), "tests/test_old.py": None}, files={"tests/t.py": b""})[2] == {"tests"}


def test_of_configuration_only_what_does_not_configure_the_judge() -> None:
    better = GIVEN["setup.cfg"].replace("name = x", "name = y")  # type: ignore
    assert carried({"setup.cfg": better})[0] == {"setup.cfg"}
    assert carried({"setup.cfg": better.replace("-q", "-k nothing")})[2] == {"setup.cfg"}
    assert carried({"tox.ini": "[pytest]\naddopts = -k nothing"})[2] == {"tox.ini"}
    assert carried({"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k x'"})[2] == {"pyproject.toml"}
    assert carried({"pyproject.toml": "[project]\nname = 'x'"})[0] == {"pyproject.toml"}
    assert carried({"package.json": '{"name": "y", "scripts": {"test": "jest"}}'})[0] == {"package.json"}
    assert carried({"package.json": '{"name": "x", "scripts": {"test": "true"}}'})[2] == {"package.json"}


def test_links_may_not_lead_to_what_judges() -> None:
    hidden = {"/tests/answer": b"", "expected/1": b""}
    for name, target in (
        ("answer", "/tests/answer"),
        ("answer", "../tests/answer"),
        ("answer", "expected/1"),
        ("folder", "expected"),
        ("all", "."),
        ("loop", "loop"),
        ("host", "/etc/passwd"),
        ("proc", "/proc/self/root"),
    ):
        assert carried({name: ("link", target)}, files=hidden) == (set(), set(), {name}), target
    chain = {"a": ("link", "data"), "b": ("link", "a/../expected")}
    assert carried(chain, files=hidden) == ({"a"}, set(), {"b"})
    assert carried({"fine": ("link", "main.py"), "src/up": ("link", "../main.py")})[0] == {"fine", "src/up"}


def test_patterns() -> None:
    assert (
        matches("tests/a/b.py", "tests/**") and matches("tests/a/b.py", "tests") and matches("tests/a/b.py", "./tests/")
    )
    assert matches("test_a.py", "**/test_*.py") and matches("x/test_a.py", "**/test_*.py")
    assert not matches("mytests/a.py", "tests") and not matches("tests.py", "tests")
