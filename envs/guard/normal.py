"""Commands as they mean, not as they are spelled.

Invariant: only for matching; what comes out is never run. Undone are quotes and backslashes, $IFS and brace lists,
variables set in the same command, `cd` within it, "..", wildcards, printf and $'' escapes, and base64 or hex text,
which is decoded and looked at too. Not undone: programs that put a path together at run time, what an earlier call left
in the shell (a variable, a link, a script), ciphers. The clean room is the wall; this is the fence before it.
"""

import base64
import binascii
import fnmatch
import posixpath
import re
from collections.abc import Collection

_IFS = re.compile(r"(\$\{IFS[^}]*\}|\$IFS\b)(\$\d)?")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\0?([0-7]{3})")
_SET = re.compile(r"(?:^|[\s;&|(])(\w+)=([^\s;&|)]*)")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_BRACES = re.compile(r"([^\s{}]{0,200})\{([^{}\s]{0,500},[^{}\s]{0,500})\}([^\s;|&]{0,200})")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){6,}")
_CD = re.compile(r"(?:^|[\s;&|(])(?:cd|pushd|-C)\s+([^\s;&|)]+)")
_WORD = re.compile(r"[^\s;|&<>()=,:\[\]]+|\[[^\]\s]*\][^\s;|&<>()=,:]*")
_LONGEST = 20_000  # characters of a call that are looked at: what is longer is content, not a command


def plain(text: str, workdir: str, paths: Collection[str]) -> str:
    """`text` in plain spelling, with what it hides behind encodings; words that mean one of `paths` become it."""
    text = text[:_LONGEST]
    spelled = _unquote(text)
    hidden = [_unquote(decoded) for decoded in _decoded(text)]
    return "\n".join(_resolve(part, workdir, paths) for part in (spelled, *hidden))


def _unquote(text: str) -> str:
    text = _ESCAPE.sub(lambda m: chr(int(m[1], 16) if m[1] else int(m[2], 8) & 0xFF), text)
    text = _IFS.sub(" ", text).replace("\\\n", "")
    text = re.sub(r"\$?['\"]|\\(?=\S)|``|\$\(\)|\$@", "", text)
    text = _BRACES.sub(lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")), text)
    values = dict(_SET.findall(text))
    for _ in range(3):
        text = _VARIABLE.sub(lambda m: values.get(m[1], m[0]), text)
    return text


def _decoded(text: str) -> list[str]:
    """Readable text behind base64 and hex words."""
    found = []
    for word in _BASE64.findall(text)[:50]:
        padded = word.rstrip("=") + "=" * (-len(word.rstrip("=")) % 4)
        try:
            found.append(base64.b64decode(padded.replace("-", "+").replace("_", "/")).decode("ascii"))
        except (binascii.Error, UnicodeDecodeError):
            continue
    for word in _HEX.findall(text)[:50]:
        try:
            found.append(bytes.fromhex(word).decode("ascii"))
        except UnicodeDecodeError:
            continue
    return [each for each in found if each.replace("\n", "").replace("\t", "").isprintable()]


def _resolve(text: str, workdir: str, paths: Collection[str]) -> str:
    places = [workdir]
    for folder in _CD.findall(text):
        places.append(posixpath.normpath(posixpath.join(places[-1], folder)))

    def path(found: re.Match[str]) -> str:
        for place in places:
            absolute = "/" + posixpath.normpath(posixpath.join(place, found[0])).lstrip("/")
            if meant := _means(absolute, paths, workdir):
                return meant
        return found[0]

    return _WORD.sub(path, text)


def _means(path: str, paths: Collection[str], workdir: str) -> str | None:
    """The path of the set that this is, or lies in; outside the workdir, also what it stands for with wildcards."""
    wild = any(sign in path for sign in "*?[") and not path.startswith(workdir + "/")
    for known in paths:
        if path == known or path.startswith(known + "/"):
            return path
        pairs = list(zip(known.split("/"), path.split("/")))
        if wild and re.search(r"[^*/]", path) and all(fnmatch.fnmatchcase(name, pattern) for name, pattern in pairs):
            return known
    return None
