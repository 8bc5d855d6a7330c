"""As much of a Dockerfile as can be followed without building it.

Invariant: what is not understood is a `Problem` for whoever asks for the files, who would otherwise play a task with
half of what it needs.
"""

import shlex
from pathlib import Path, PurePosixPath

from .reading import Problem, content, files_under, text

WORKDIR = "/app"  # where most tasks work, for an image that nobody here can ask


class Dockerfile:
    """Its last stage: where commands start, variables, and the files that COPY brings."""

    def __init__(self, path: Path):
        self.path, self.workdir = path, "/"
        self.variables: dict[str, str] = {}
        self._copies: list[tuple[int, list[str], PurePosixPath, bool]] = []
        self._beyond: tuple[int, str] | None = None
        for number, line in enumerate(text(path).replace("\\\n", " ").splitlines(), 1):
            word, _, rest = line.strip().partition(" ")
            if word and not word.startswith("#"):
                self._follow(number, word.upper(), rest.strip())
        if self.workdir == "/":
            self.workdir = WORKDIR

    def _follow(self, number: int, word: str, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError:  # only what we would not follow anyway has quotes that a shell does not close
            words = []
        match word:
            case "FROM":
                self.workdir, self.variables, self._copies = "/", {}, []
            case "WORKDIR" if words:
                self.workdir = str(PurePosixPath(self.workdir) / words[0])
            case "ENV" if words and all("=" in pair for pair in words):
                self.variables |= dict(pair.split("=", 1) for pair in words)
            case "COPY" if len(words) > 1 and not rest.startswith(("-", "[")):
                into = len(words) > 2 or words[-1].endswith("/") or words[-1] == "."
                self._copies.append((number, words[:-1], PurePosixPath(self.workdir) / words[-1], into))
            case "CMD" | "LABEL" | "EXPOSE" | "MAINTAINER":
                pass
            case _:
                self._beyond = self._beyond or (number, f"{word} {rest}")

    def files(self) -> dict[str, bytes]:
        """What its COPY lines bring, by absolute path."""
        if self._beyond is not None:
            number, line = self._beyond
            raise Problem(f"{self.path}:{number}", "", f"{line:.40} needs an image to be built: use Docker")
        found: dict[str, bytes] = {}
        for number, sources, target, into in self._copies:
            for source in sources:
                found |= self._copied(number, source, target, into)
        return found

    def _copied(self, number: int, source: str, target: PurePosixPath, into: bool) -> dict[str, bytes]:
        origin = self.path.parent / source
        if origin.is_dir():
            return {
                name: data
                for name, data in files_under(origin, f"{target}/").items()
                if not name.endswith("/Dockerfile")
            }
        if not origin.is_file():
            raise Problem(f"{self.path}:{number}", "", f"copies {source}, which is not there")
        return {str(target / origin.name if into else target): content(origin)}
