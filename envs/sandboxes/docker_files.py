"""Files in a container, by what every image has: a shell, cat and tar, each call a process of its own.

Invariant: a path reaches the shell as an argument, never as text of a script. Tars are checked and put in order on our
side: what goes in holds files, folders and links within reach, and a link in place of a folder is removed first.
"""

import errno
import io
import os
import posixpath
import re
import tarfile
from collections.abc import Awaitable, Callable, Sequence

from .archive import sift
from .spec import SandboxSpec

Run = Callable[..., Awaitable[tuple[int, bytes, bytes]]]
"""(script, *arguments, stdin, most) -> (exit status, output, complaints)."""

_WRITE = """
[ ! -e "$1" ] || [ -f "$1" ] || [ -d "$1" ] || { echo "Invalid argument: not a regular file" >&2; exit 1; }
mkdir -p -- "$2" && cat >"$1" && { [ -z "$3" ] || chmod +x -- "$1"; }
"""
_READ = """
[ -e "$1" ] || { ls -d -- "$1" >&2; exit 1; }
[ ! -d "$1" ] || { echo "Is a directory" >&2; exit 1; }
[ -f "$1" ] || { echo "Invalid argument: not a regular file" >&2; exit 1; }
exec cat -- "$1"
"""
_TAKE = """
cd / || exit
for path; do
    shift
    if [ -e "$path" ] || [ -L "$path" ]; then set -- "$@" "$path"; fi
done
[ $# != 0 ] || exit 0
find "$@" \\( -type d ! -perm -500 -o -type f ! -perm -400 \\) -exec chmod u+rX {} \\; 2>/dev/null
exec tar -cf - "$@"
"""
_PUT = """
cd / || exit
for folder; do
    if [ -L "$folder" ] || { [ -e "$folder" ] && [ ! -d "$folder" ]; }; then rm -f "$folder" || exit; fi
done
exec tar -xof -
"""
_LINKS_OF_IMAGES = frozenset(("bin", "lib", "lib32", "lib64", "libx32", "sbin", "var/lock", "var/run"))
_CHANGED = 1  # tar's exit status where files changed while it read them
_FSIZE = 128 + 25  # killed for a file that is too large


class Files:
    def __init__(self, spec: SandboxSpec, run: Run):
        self._spec, self._run = spec, run

    async def write(self, path: str, content: str | bytes, executable: bool) -> None:
        path = self._absolute(path)
        data = content.encode(errors="replace") if isinstance(content, str) else content
        folder, mark = posixpath.dirname(path), "x" if executable else ""
        _check(*await self._run(_WRITE, path, folder, mark, stdin=data), path)

    async def read(self, path: str) -> bytes:
        path, most = self._absolute(path), self._spec.limits.file_size
        status, content, complaint = await self._run(_READ, path, most=most)
        _check(status, content, complaint, path)
        return content

    async def snapshot(self, paths: Sequence[str] | None, exclude: Sequence[str]) -> bytes:
        wanted = [
            self._absolute(path).lstrip("/") or "." for path in ([self._spec.workdir] if paths is None else paths)
        ]
        most = self._spec.limits.disk
        status, tar, complaint = await self._run(_TAKE, *wanted, most=most + (most >> 2))
        _check(0 if status == _CHANGED else status, tar, complaint, ", ".join(wanted))
        try:
            return sift(_renamed(tar, self._relative), most, exclude, drop=True)
        except ValueError as error:
            raise OSError(errno.EFBIG, str(error)) from error

    async def restore(self, tar: bytes) -> None:
        tar = _renamed(sift(tar, self._spec.limits.disk), lambda name: self._absolute(name).lstrip("/") or ".")
        folders: dict[str, None] = {}
        with tarfile.open(fileobj=io.BytesIO(tar)) as source:
            for member in source:
                parts = member.name.split("/")[: None if member.isdir() else -1]
                folders |= dict.fromkeys("/".join(parts[: i + 1]) for i in range(len(parts)))
        ours = [folder for folder in folders if folder not in _LINKS_OF_IMAGES]
        _check(*await self._run(_PUT, *ours, stdin=tar), "a tar")

    def _absolute(self, path: str) -> str:
        try:
            if "\0" in path or not path.encode():
                raise ValueError
        except ValueError:  # a model's JSON can hold half a surrogate pair, too
            raise OSError(errno.EINVAL, "not a path", path) from None
        return posixpath.normpath(posixpath.join(self._spec.workdir, path))

    def _relative(self, name: str) -> str:
        path, workdir = posixpath.normpath("/" + name), self._spec.workdir.rstrip("/") + "/"
        return posixpath.relpath(path, workdir) if (path + "/").startswith(workdir) else path


def _renamed(tar: bytes, rename: Callable[[str], str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as target:
        if tar:
            with tarfile.open(fileobj=io.BytesIO(tar)) as source:
                for member in source:
                    content = source.extractfile(member) if member.isreg() else None
                    member.name, member.pax_headers = rename(member.name), {}
                    if member.islnk():
                        member.linkname = rename(member.linkname)
                    target.addfile(member, content)
    return stream.getvalue()


_CODES = {os.strerror(code): code for code in errno.errorcode}


def _check(status: int, output: bytes, complaint: bytes, path: str) -> None:
    """OSError as the kernel would raise it, as far as the complaint tells."""
    if status == 0:
        return
    said = complaint.decode(errors="replace").strip()
    if status == _FSIZE:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    found = [text for text in _CODES if re.search(rf"(?i)\b{re.escape(text)}", said)]
    code = _CODES[max(found, key=len)] if found else errno.EIO
    raise OSError(code, said.splitlines()[-1] if said and not found else os.strerror(code), path)
