"""A local clone, bare or not, as the place that tasks take their files from.

Invariant: nothing of the clone changes (what a patch makes is written elsewhere), and nothing but the files of one
commit leaves it: no history, no refs, no later commits. Tasks of the same clone share the contents of their files.
"""

import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_EXECUTABLE, _LINK, _SUBMODULE = "100755", "120000", "160000"
_SECONDS = 120.0


@dataclass(frozen=True)
class Checkout:
    """The files of one state: contents by path, and what bytes alone do not say."""

    files: dict[str, bytes]
    links: dict[str, str]
    executables: tuple[str, ...]

    def finish(self) -> str:
        """The shell command that makes links and sets modes, in a workdir that has the files."""
        links = [f"ln -sfn {shlex.quote(target)} {shlex.quote(path)}" for path, target in self.links.items()]
        modes = [f"chmod +x {' '.join(map(shlex.quote, self.executables))}"] if self.executables else []
        return " && ".join(links + modes) or "true"

    def changes(self, later: "Checkout") -> tuple[dict[str, bytes], tuple[str, ...]]:
        """What to write and what to remove to come from this state to a later one."""
        written = {path: data for path, data in later.files.items() if self.files.get(path) != data}
        return written, tuple(path for path in self.files if path not in later.files)


class Repository:
    def __init__(self, path: Path):
        self.path = path
        self._contents: dict[str, bytes] = {}
        self._objects = Path(self._git("rev-parse", "--absolute-git-dir").decode().strip()) / "objects"

    def checkout(self, commit: str, *patches: str) -> Checkout:
        """The files of a commit after these patches; ValueError when it is not there or one does not apply."""
        with tempfile.TemporaryDirectory() as scratch:
            apart = {
                "GIT_INDEX_FILE": f"{scratch}/index",
                "GIT_OBJECT_DIRECTORY": scratch,
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._objects),
            }
            self._git("read-tree", f"{commit}^{{commit}}", env=apart)
            for patch in filter(str.strip, patches):
                self._git("apply", "--cached", "--whitespace=nowarn", "-", env=apart, stdin=patch.encode())
            listing = self._git("ls-files", "--stage", "-z", env=apart).decode(errors="surrogateescape")
            entries = {}
            for line in listing.split("\0")[:-1]:
                about, _, path = line.partition("\t")
                entries[path] = about.split()[:2]
            self._read(sorted({blob for mode, blob in entries.values() if mode != _SUBMODULE}), apart)
        kept = {path: (mode, self._contents[blob]) for path, (mode, blob) in entries.items() if mode != _SUBMODULE}
        return Checkout(
            {path: data for path, (mode, data) in kept.items() if mode != _LINK},
            {path: data.decode() for path, (mode, data) in kept.items() if mode == _LINK},
            tuple(path for path, (mode, _) in kept.items() if mode == _EXECUTABLE),
        )

    def _read(self, blobs: list[str], env: dict[str, str]) -> None:
        missing = [blob for blob in blobs if blob not in self._contents]
        answer = self._git("cat-file", "--batch", env=env, stdin="".join(f"{blob}\n" for blob in missing).encode())
        at = 0
        for blob in missing:
            end = answer.index(b"\n", at)
            size = int(answer[at:end].split()[2])
            self._contents[blob] = answer[end + 1 : end + 1 + size]
            at = end + size + 2

    def _git(self, *arguments: str, env: dict[str, str] | None = None, stdin: bytes = b"") -> bytes:
        command = ["git", "-c", "safe.directory=*", "-C", str(self.path), *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, timeout=_SECONDS, env=os.environ | (env or {})
            )
        except FileNotFoundError:
            raise ValueError("git is missing, a local repository needs it: apt install git") from None
        if done.returncode:
            raise ValueError(f"git {arguments[0]} in {self.path}: {done.stderr.decode(errors='replace').strip()[:300]}")
        return done.stdout
