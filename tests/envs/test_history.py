"""A real repository that holds the fix in every place git has for it."""

import subprocess
import zlib
from pathlib import Path

import pytest
from argosy.envs import EnvError
from argosy.envs.grading.history import strip_history

COMMANDS = ("log --all -p", "reflog --all", "stash list", "tag -n", "branch -avv", "remote -v", "fsck --lost-found")
FIX = b"return a + b  # the fix"

LEAKS = """
git init -q . && git config user.name A && git config user.email a@example.org && git config gc.auto 0
echo 'return 0' > add.py && git add . && git commit -qm first
echo 'more' > other.py && git add . && git commit -qm second
cut=$(git rev-parse HEAD); trunk=$(git symbolic-ref --short HEAD)
fix() { echo "return a + b  # the fix" > add.py; echo "$1" >> add.py; git add .; git commit -qm "the fix $1"; }
for place in branch tag remote packed; do git checkout -q -B $place $cut; fix $place; done
git tag v2 tag; git tag -a v3 -m "the fix annotated" tag; git branch -qD tag
git update-ref refs/remotes/origin/main remote; git branch -qD remote; git remote add origin https://example.org/x.git
git pack-refs --all
git checkout -q --detach $cut; fix dangling; git update-ref ORIG_HEAD HEAD; git checkout -q $cut
git notes add -m "the fix as a note" HEAD
echo "return a + b  # the fix stashed" > add.py; git stash -q
git worktree add -q ../elsewhere packed
git repack -qad; for pack in .git/objects/pack/*.pack; do touch ${pack%.pack}.keep; done
git commit-graph write --reachable
git clone -q --bare . ../lent 2> /dev/null; (cd ../lent && git config gc.auto 0)
(cd ../elsewhere && echo 'return a + b  # the fix lent' > add.py && git commit -qam 'the fix lent')
echo "$(cd ../lent && pwd)/objects" > .git/objects/info/alternates
git checkout -q -B $trunk $cut
echo "return a + b  # the fix staged" > add.py; git add add.py; echo 'return 0' > add.py; echo mine > untracked.py
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["bash", "-ec", LEAKS], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def git(folder: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, timeout=60).stdout


def everywhere(folder: Path) -> bytes:
    """Whatever git commands show, and whatever lies in .git, also where no command looks."""
    found = [git(folder, "cat-file", "--batch-all-objects", "--batch", "--unordered")]
    for words in (
        "log --all -p",
        "reflog --all",
        "stash list",
        "tag -n",
        "branch -avv",
        "fsck --lost-found",
        "remote -v",
    ):
        found.append(git(folder, *words.split()))
    for file in (folder / ".git").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            found.append(content)
            if file.parent.parent.name == "objects" and len(file.parent.name) == 2:
                found.append(zlib.decompress(content))
    return b"\n".join(found)


def test_the_fix_is_nowhere_and_the_past_still_is(repository: Path) -> None:
    assert FIX in everywhere(repository), "or there is nothing to prove"
    hashes = {
        line.split()[0] for line in git(repository, "log", "--all", "--format=%H %s").splitlines() if b"fix" in line
    }
    strip_history(repository)
    found = everywhere(repository)
    assert FIX not in found and b"the fix" not in found and b"example.org/x.git" not in found
    assert not any(each in found for each in hashes), "not even by name"
    assert git(repository, "log", "--format=%s").split() == [b"second", b"first"]
    assert git(repository, "status", "--porcelain") == b"?? untracked.py\n"
    assert (repository / "add.py").read_text() == "return 0\n"
    assert git(repository, "fsck", "--full", "--strict") == b""
    git(repository, "commit", "-q", "--allow-empty", "-m", "it can be worked in")
    assert git(repository, "log", "-1", "--format=%s") == b"it can be worked in\n"
    strip_history(repository)


def test_what_is_no_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="cannot be stripped"):
        strip_history(tmp_path)
