"""What of an agent's work is graded: the difference between its files and the task's, without what could fake a grade.

Invariant: nothing in here decides *whether* the work is right, only what may reach the room where that is found out. A
file is left out when it would change the judge instead of the work: what the task protects, what the hidden files will
replace, files that test runners and interpreters obey without being asked (a conftest.py, a sitecustomize.py, cached
byte code), and links out of the work or onto what the agent may not know. Of these the room keeps the task's version.
Both archives are parsed here, outside, and only plain files, folders and checked links are ever written again.
"""

import configparser
import fnmatch
import io
import json
import posixpath
import re
import tarfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..tasks import Stage

OBEYED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pyc",
    "*.pyo",
    "__pycache__",
    ".pytest_cache",
    ".coveragerc",
    ".git",
    ".cargo",
    ".mocharc*",
    "jest.config.*",
    "vitest.config.*",
    "nextest.toml",
)
"""Names, at any depth, that a test runner or an interpreter obeys. A task that wants one carried ships it as hidden."""

_INSTALLED = re.compile(
    r"(^|/)bin/(python|pytest|py\.test)[^/]*$|-packages/([^/]*\.pth$|(_?pytest|pluggy|coverage|xdist)([./]|$))"
)
"""What an environment in the workdir runs tests with."""

SHADOWING = frozenset({"pytest", "_pytest", "pluggy", "unittest", "nose", "coverage", "xdist"})
"""Modules that `python -m` would find in the workdir before the real ones."""

_CONFIGURED = ("setup.cfg", "tox.ini", "pyproject.toml", "package.json")
_NODE = ("scripts", "jest", "vitest", "mocha", "ava", "type")


@dataclass(frozen=True)
class Work:
    """What the agent made, by absolute path."""

    written: Mapping[str, tarfile.TarInfo]
    contents: Mapping[str, bytes]
    removed: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Paths that differ from the task's and were not taken along."""

    @classmethod
    def of(cls, files: Mapping[str, bytes], workdir: str) -> "Work":
        """These files as they are; scripts may be executed."""
        written = {}
        for name, content in files.items():
            written[absolute(name, workdir)] = info = tarfile.TarInfo()
            info.mode = 0o755 if content.startswith(b"#!") else 0o644
        return cls(written, {absolute(name, workdir): content for name, content in files.items()}, ())

    def __or__(self, other: "Work") -> "Work":
        return Work({**self.written, **other.written}, {**self.contents, **other.contents}, self.removed, self.left_out)

    def archive(self, workdir: str) -> bytes:
        """What was written as `Sandbox.restore` wants it: named relative to the workdir, or absolute."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path, info in sorted(self.written.items()):
                content = self.contents.get(path, b"")
                plain = tarfile.TarInfo(posixpath.relpath(path, workdir) if _within(path, workdir) else path)
                plain.type, plain.linkname, plain.size = info.type, info.linkname, len(content)
                plain.mode, plain.mtime = info.mode & 0o777 | 0o600, info.mtime
                tar.addfile(plain, io.BytesIO(content))
        return buffer.getvalue()


@dataclass(frozen=True)
class _Tree:
    """The files of an archive by absolute path."""

    entries: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def same(self, other: "_Tree", path: str) -> bool:
        ours, theirs = self.entries[path], other.entries.get(path)
        if theirs is None or ours.type != theirs.type or ours.linkname != theirs.linkname:
            return False
        if ours.isdir():
            return True
        return (ours.mode & 0o111) == (theirs.mode & 0o111) and self.contents.get(path) == other.contents.get(path)


def difference(made: bytes, given: bytes, stage: Stage, workdir: str) -> Work:
    """The agent's archive `made` against `given`, the same paths of a sandbox where only the task has been."""
    theirs, ours = _read(made, workdir), _read(given, workdir)
    rules = _Rules(stage, workdir, ours)
    changed = [path for path in theirs.entries if not theirs.same(ours, path)]
    links = {p: t.linkname for tree in (ours, theirs) for p, t in tree.entries.items() if t.issym()}
    kept = [path for path in changed if rules.allow(path, theirs, links)]
    removed = [path for path, entry in ours.entries.items() if path not in theirs.entries and not entry.isdir()]
    gone = [path for path in removed if not rules.spared(path)]
    return Work(
        {path: theirs.entries[path] for path in kept},
        {path: theirs.contents[path] for path in kept if path in theirs.contents},
        tuple(gone),
        tuple(sorted({*changed, *removed} - {*kept, *gone})),
    )


def contents(archive: bytes, workdir: str) -> Mapping[str, bytes]:
    """The regular files of an archive, by absolute path."""
    return _read(archive, workdir).contents


def absolute(path: str, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, path))


def matches(path: str, pattern: str) -> bool:
    """`*` also crosses folders, a folder's pattern covers what is in it, and a leading `**/` may stand for nothing."""
    pattern = pattern.removeprefix("./").rstrip("/")
    parts = path.split("/")
    heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatch.fnmatchcase(head, p) for head in heads for p in {pattern, pattern.removeprefix("**/")})


class _Rules:
    def __init__(self, stage: Stage, workdir: str, given: _Tree):
        self.workdir, self.given = workdir, given
        self.roots = [absolute(path, workdir) for path in stage.grading.artefacts]
        self.protected = stage.grading.protected
        self.hidden = {absolute(path, workdir) for path in stage.grading.files}
        untouchable = [*self.hidden, *(path for path in given.entries if self.spared(path))]
        self.above = {folder for path in untouchable for folder in _parents(path)}

    def spared(self, path: str) -> bool:
        """The task's version of this stays, whatever the agent did."""
        relative = posixpath.relpath(path, self.workdir)
        if path in self.hidden or any(matches(relative, pattern) for pattern in self.protected):
            return True
        parts = relative.split("/")
        if _INSTALLED.search(relative) or any(part.removesuffix(".py") in SHADOWING for part in parts[:2]):
            return True
        return any(fnmatch.fnmatchcase(part, name) for part in parts for name in OBEYED)

    def allow(self, path: str, made: _Tree, links: Mapping[str, str]) -> bool:
        entry = made.entries[path]
        if not any(_within(path, root) for root in self.roots) or self.spared(path):
            return False
        if not entry.isdir() and path in self.above:
            return False
        if entry.issym():
            return self._harmless(path, links)
        name = posixpath.basename(path)
        if name in _CONFIGURED:
            return _runner_section(name, made.contents[path]) == _runner_section(name, self.given.contents.get(path))
        return True

    def _harmless(self, path: str, links: Mapping[str, str]) -> bool:
        """A link that ends inside the work, and neither at what is spared nor at a folder that holds some."""
        end = _follow(path, links)
        if end is None or not any(_within(end, root) for root in self.roots):
            return False
        return not self.spared(end) and end not in self.above


def _read(archive: bytes, workdir: str) -> _Tree:
    """Regular files, folders and symbolic links; what else an agent can make (a fifo, a device) is not work."""
    tree = _Tree()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            path = absolute(entry.name, workdir)
            if entry.isreg() or entry.islnk():
                try:
                    file = tar.extractfile(entry)
                except KeyError:  # a hard link to what is not in the archive
                    continue
                if file is None:
                    continue
                tree.contents[path] = file.read()
                entry.type, entry.linkname = tarfile.REGTYPE, ""
            tree.entries[path] = entry
    return tree


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _parents(path: str) -> Iterable[str]:
    while path != "/":
        path = posixpath.dirname(path)
        yield path


def _follow(path: str, links: Mapping[str, str]) -> str | None:
    """Where a path ends, link by link, as the kernel would go; None where it goes in circles."""
    todo, at = path.split("/")[::-1], "/"
    for _ in range(1000):
        if not todo:
            return at
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = posixpath.dirname(at)
            continue
        at = posixpath.join(at, part)
        if at in links:
            target = links[at]
            todo += target.split("/")[::-1]
            at = "/" if target.startswith("/") else posixpath.dirname(at)
    return None


def _runner_section(name: str, content: bytes | None) -> Any:
    """What a configuration file tells the test runner; a file that cannot be read tells something of its own."""
    text = (content or b"").decode(errors="replace")
    try:
        if name == "pyproject.toml":
            return tomllib.loads(text).get("tool", {}).get("pytest")
        if name == "package.json":
            return {key: value for key, value in json.loads(text or "{}").items() if key in _NODE}
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read_string(text)
        return [(s, parser.items(s)) for s in parser.sections() if s in ("pytest", "tool:pytest")]
    except (ValueError, AttributeError, RecursionError, configparser.Error):
        return text
