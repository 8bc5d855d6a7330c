"""From what a task names as its image to one that the engine has: a tag, an image's tar, a folder with a Dockerfile.

Invariant: the same file or folder, unchanged, is loaded or built once for an engine: its tag is a hash of names, sizes
and times of change. What Argosy makes is labelled `argosy.image`.
"""

import hashlib
import tarfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import SandboxUnavailable
from .docker_engine import address, engine

_LABEL = "argosy.image"
_TAIL = 30  # lines of a failed build that are told
_making = threading.Lock()  # one at a time: they are heavy, and the second may find what the first made


def find_or_make(image: str | None) -> str:
    """The id of the image; takes as long as its download or its Dockerfile does."""
    if not image:
        raise SandboxUnavailable(
            'the Docker back end needs `image`: a tag such as "python:3.12", the path of an image\'s tar, or of a '
            "folder with a Dockerfile"
        )
    path = Path(image).expanduser()
    with _making:
        if (path / "Dockerfile").is_file():
            return _once(f"argosy/built:{_signature(path, path.rglob('*'))}", lambda tag: _build(path, tag))
        if path.is_file():
            return _once(f"argosy/loaded:{_signature(path, [path])}", lambda tag: _load(path, tag))
        if image.startswith(("/", "./", "../", "~")):
            what = "has no Dockerfile" if path.is_dir() else "is neither a tar nor a folder with a Dockerfile"
            raise SandboxUnavailable(f"image {image}: {path.resolve()} {what}")
        return _once(image, _pull)


def _once(tag: str, make: Any) -> str:
    from docker.errors import APIError, ImageNotFound

    try:
        return engine().inspect_image(tag)["Id"]
    except ImageNotFound:
        pass
    try:
        make(tag)
        return engine().inspect_image(tag)["Id"]
    except APIError as error:
        raise SandboxUnavailable(f"the engine cannot make image {tag}: {error.explanation or error}") from error


def _signature(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(str(root.resolve()).encode())
    for file in sorted(files):
        found = file.lstat()
        digest.update(f"{file.relative_to(root)}\0{found.st_mode}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _pull(tag: str) -> None:
    from docker.errors import APIError
    from docker.utils import parse_repository_tag

    name, version = parse_repository_tag(tag)
    try:
        for line in engine(patient=True).pull(name, version or "latest", stream=True, decode=True):
            if "error" in line:
                raise SandboxUnavailable(_not_here(tag, line["error"]))
    except APIError as error:
        raise SandboxUnavailable(_not_here(tag, error.explanation or str(error))) from error


def _not_here(tag: str, why: str) -> str:
    return (
        f"image {tag} is not at {address()} and cannot be pulled: {why}. Check the name, `docker login` to its "
        "registry, or load it from a file (docker load) where there is no network"
    )


def _load(path: Path, tag: str) -> None:
    """What `docker save` wrote, or the tar of a root file system."""
    api = engine(patient=True)
    try:
        with tarfile.open(path) as tar:
            saved = next((m.name for m in tar if m.name in ("manifest.json", "index.json", "oci-layout")), None)
    except tarfile.TarError as error:
        raise SandboxUnavailable(f"image {path} is no tar: {error}") from error
    if not saved:
        with path.open("rb") as file:
            answer = api.import_image_from_data(file, repository=tag, changes=[f"LABEL {_LABEL}=loaded"])
        if "error" in str(answer):
            raise SandboxUnavailable(f"the engine cannot import {path}: {answer}")
        return
    with path.open("rb") as file:
        said = "".join(str(line.get("error") or line.get("stream") or "") for line in api.load_image(file))
    loaded = [line.partition(": ")[2].strip() for line in said.splitlines() if line.startswith("Loaded image")]
    if not loaded:
        raise SandboxUnavailable(f"the engine cannot load {path}: {said.strip()}")
    api.tag(loaded[-1], *tag.split(":"))


def _build(folder: Path, tag: str) -> None:
    said: list[str] = []
    for line in engine(patient=True).build(
        path=str(folder), tag=tag, rm=True, forcerm=True, labels={_LABEL: "built"}, decode=True
    ):
        said += (line.get("stream") or "").splitlines()
        if "error" in line:
            log = "\n".join([text for text in said if text.strip()][-_TAIL:])
            raise SandboxUnavailable(f"{folder}/Dockerfile cannot be built: {line['error']}\n{log}")
