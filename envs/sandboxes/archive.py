"""Tars of sandboxes, which agents fill: what may go into one, and what may come out.

Invariant: what `sift` returns holds folders, regular files and symbolic links, under names without "..", and unpacked
it is no larger than allowed. Whoever unpacks it must follow no link, because links may lead anywhere.
"""

import io
import re
import tarfile
from collections.abc import Sequence

_SET = r"\[!?[^\]]+\]"  # such as [!a-z]


def sift(tar: bytes, most: int, exclude: Sequence[str] = (), drop: bool = False) -> bytes:
    """The tar again, hard links made copies; ValueError for what has no place in it, or with `drop` without that.

    `exclude` are globs, matched against the members' names; `most` bounds the bytes of all contents.
    """
    left_out = re.compile(pattern(exclude) or "(?!)").fullmatch
    contents: dict[str, bytes] = {}
    output = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as before,
            tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as after,
        ):
            for member in before:
                name = member.name.rstrip("/") or "/"
                if left_out(name):
                    continue
                if problem := _problem(member, contents):
                    if drop and ".." not in name.split("/"):
                        continue
                    raise ValueError(f"{name!r} in the tar {problem}")
                if member.isreg():
                    file = before.extractfile(member)
                    assert file is not None
                    contents[name] = file.read()
                content = contents.get(member.linkname if member.islnk() else name, b"")
                most -= len(content)
                if most < 0:
                    raise ValueError(f"the tar's contents are larger than allowed at {name!r}")
                after.addfile(_like(member, content), io.BytesIO(content))
    except tarfile.TarError as error:
        raise ValueError(f"not a tar: {error}") from error
    return output.getvalue()


def pattern(globs: Sequence[str]) -> str | None:
    """One regular expression for all: `*` and `?` stay within a name, `**/` is any number of folders, also none; what
    matches a folder matches all that is in it."""
    return "|".join(f"(?:{_expression(glob)})(?:/.*)?" for glob in globs) or None


def _problem(member: tarfile.TarInfo, contents: dict[str, bytes]) -> str | None:
    if ".." in member.name.split("/"):
        return "leads out of its folder"
    if member.issparse():
        return "is sparse, so that its size cannot be trusted"
    if member.islnk() and member.linkname not in contents:
        return f"is a hard link to {member.linkname!r}, which does not come before it"
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return "is neither a file, a folder nor a link"
    return None


def _like(member: tarfile.TarInfo, content: bytes) -> tarfile.TarInfo:
    kept = tarfile.TarInfo(member.name)
    kept.mode, kept.mtime, kept.size = member.mode & 0o1777, member.mtime, len(content)
    if member.isdir():
        kept.type = tarfile.DIRTYPE
    elif member.issym():
        kept.type, kept.linkname = tarfile.SYMTYPE, member.linkname
    return kept


def _expression(glob: str) -> str:
    replaced = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translated(part: str) -> str:
        if re.fullmatch(_SET, part):
            return part.replace("[!", "[^", 1).replace("\\", r"\\")
        return replaced.get(part) or re.escape(part)

    return "".join(map(translated, re.split(rf"(\*\*/|\*\*|\*|\?|{_SET})", glob.removeprefix("./").rstrip("/"))))
