"""A Python package with its tests, as files: from a folder, a source archive, or by name through pip.

Invariant: nothing of the package is imported or run here. (To hand out a source archive, pip itself runs the package's
build step, as for any install; `find` with a path runs nothing.) What cannot be used is an `UnusablePackage` that says
why and what to do.
"""

import functools
import importlib.metadata
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import UnusablePackage

LARGEST = 16 * 2**20  # bytes of source and tests: they travel into every sandbox
DOWNLOAD_SECONDS = 300
_COMPILED = {".c", ".cc", ".cpp", ".pyx", ".pxd", ".rs", ".so", ".pyd", ".f90"}
_TEST_FOLDERS = {"tests", "test", "testing"}
_NO_SOURCE = {*_TEST_FOLDERS, "docs", "doc", "examples", "benchmark", "benchmarks", "scripts", "tools", "build", "dist"}
_NO_MODULE = {"setup", "conftest", "noxfile", "tasks", "fabfile", "versioneer", "ez_setup"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    files: Mapping[str, bytes]
    """Source, tests and their data by path, such as "boltons/iterutils.py" and "tests/test_iterutils.py"."""
    roots: tuple[str, ...]
    """What is imported: "boltons", "src/attr", "six.py"."""
    tests: tuple[str, ...]
    """The test files."""

    @property
    def path(self) -> str:
        """Where imports start."""
        return "src" if self.roots[0].startswith("src/") else "."

    @property
    def sources(self) -> list[str]:
        """What may be broken: Python files of the package that are no tests."""
        return [file for file in self.files if _below(file, self.roots) and file.endswith(".py") and not is_test(file)]


def is_test(file: str) -> bool:
    """A test file, or in a folder of tests; whatever an agent makes of these does not count."""
    path = PurePosixPath(file)
    named = path.name == "conftest.py" or path.name.startswith("test_") or path.stem.endswith("_test")
    return named or bool(_TEST_FOLDERS.intersection(path.parts[:-1]))


def find(source: str) -> Package:
    """`source` is a folder, a .tar.gz or .zip of source, or a name for pip ("boltons", "toolz==1.0.0")."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _read(path, path.resolve().name)
    with tempfile.TemporaryDirectory(prefix="argosy-package-") as scratch:
        archive = path if path.is_file() else _download(source, Path(scratch) / "download")
        folder = Path(scratch) / "source"
        _unpack(archive, folder)
        inside = list(folder.iterdir())
        return _read(inside[0] if len(inside) == 1 and inside[0].is_dir() else folder, source)


def _download(name: str, folder: Path) -> Path:
    if not _NAME.fullmatch(name):
        raise UnusablePackage(f"{name!r} is no file or folder, and no name for pip such as boltons or toolz==1.0.0")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--dest", str(folder), name],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise UnusablePackage(
            f"pip did not fetch {name} within {DOWNLOAD_SECONDS} s: is there a network? Otherwise give the path of its "
            "source archive or folder"
        ) from None
    found = sorted(folder.glob("*")) if folder.is_dir() else []
    if done.returncode or not found:
        why = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise UnusablePackage(
            f"pip cannot fetch the source of {name}: {why[-1][-300:]}. Without a network, or for a package that has no "
            "source archive, give the path of its source archive or folder"
        )
    return found[0]


def _unpack(archive: Path, folder: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:  # keeps members inside the folder by itself
                opened.extractall(folder)
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise UnusablePackage(f"{archive} is not a readable .tar.gz or .zip: {error}") from None


def _read(folder: Path, source: str) -> Package:
    name, version = _identity(folder, source)
    base = folder / "src" if any((folder / "src").glob("*/__init__.py")) else folder
    packages = [file.parent for file in sorted(base.glob("*/__init__.py")) if file.parent.name not in _NO_SOURCE]
    modules = [file for file in sorted(base.glob("*.py")) if file.stem not in _NO_MODULE and not is_test(file.name)]
    roots = packages or modules
    if not roots:
        raise UnusablePackage(f"{source} holds no Python package: no */__init__.py and no module in {base.name}/")
    kept = [*roots, *(folder / each for each in sorted(_TEST_FOLDERS)), *folder.glob("*.egg-info")]
    kept += [file for file in sorted(folder.glob("*.py")) if is_test(file.name)]
    files: dict[str, bytes] = {}
    for place in kept:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and not file.is_symlink() and "__pycache__" not in file.parts:
                files[file.relative_to(folder).as_posix()] = file.read_bytes()
    names = tuple(root.relative_to(folder).as_posix() for root in roots)
    if compiled := [file for file in files if _below(file, names) and PurePosixPath(file).suffix in _COMPILED]:
        raise UnusablePackage(f"{source} has compiled parts ({compiled[0]}): only pure-Python packages can be used")
    if (size := sum(map(len, files.values()))) > LARGEST:
        raise UnusablePackage(f"{source} has {size >> 20} MB of source and tests; the most is {LARGEST >> 20}")
    tests = tuple(file for file in files if _is_test_file(file))
    if not tests:
        raise UnusablePackage(
            f"{source} comes without tests (no test_*.py in it); some projects leave them out of their source archive: "
            "give a folder with a checkout of its repository"
        )
    return Package(name, version, files, names, tests)


def _is_test_file(file: str) -> bool:
    path = PurePosixPath(file)
    return path.suffix == ".py" and (path.name.startswith("test_") or path.stem.endswith("_test"))


def _below(file: str, roots: tuple[str, ...]) -> bool:
    return any(file == root or file.startswith(root + "/") for root in roots)


def _identity(folder: Path, source: str) -> tuple[str, str]:
    """From PKG-INFO of an archive, else pyproject.toml, else the name of the folder."""
    if (info := folder / "PKG-INFO").is_file():
        found = _headers(info)
        if "name" in found:
            return found["name"], found.get("version", "0")
    if (project := folder / "pyproject.toml").is_file():
        try:
            table = tomllib.loads(project.read_text()).get("project", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UnusablePackage(f"{project} cannot be read: {error}") from None
        return str(table.get("name", folder.name)), str(table.get("version", "0"))
    return PurePosixPath(source).name, "0"


def _headers(info: Path) -> dict[str, str]:
    pairs = (line.partition(": ") for line in info.read_text(errors="replace").split("\n\n")[0].splitlines())
    return {key.lower(): value.strip() for key, _, value in pairs}


@functools.cache
def pytest_archive() -> bytes:
    """Pytest and what it needs, importable as it is: a sandbox sees no site-packages of the host."""
    try:
        from packaging.requirements import Requirement

        waiting, seen = ["pytest"], dict[str, importlib.metadata.Distribution]()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen[name] = importlib.metadata.distribution(name)
                needs = map(Requirement, seen[name].requires or ())
                waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise UnusablePackage(f"tests run with pytest, which is not here ({error}): pip install pytest") from None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for distribution in seen.values():
            for file in sorted(distribution.files or (), key=str):
                if _portable(file):
                    archive.writestr(zipfile.ZipInfo(str(file)), file.read_binary(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _portable(file: importlib.metadata.PackagePath) -> bool:
    """Of pygments' five hundred languages pytest shows two."""
    if ".." in file.parts or "__pycache__" in file.parts:
        return False
    wanted = file.suffix == ".py" or file.name in ("METADATA", "entry_points.txt")
    return wanted and (file.parent.name != "lexers" or file.stem in ("__init__", "_mapping", "diff", "python"))
