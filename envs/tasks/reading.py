"""Reading what people wrote: every complaint names the file, the field in it and the fix.

Invariant: a loader yields, for each task it finds, either the `Task` or the `Problem` that kept it from being one; a
malformed task never hides its neighbours.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .task import Task

_LARGEST = 32 * 2**20  # bytes of one file: more is no part of a task but a mistake


class Problem(ValueError):
    """Why one task could not be loaded, e.g. `Problem("a/task.toml", "verifier.timeout_sec", "must be a number")`."""

    def __init__(self, where: str | Path, field: str, message: str):
        self.where, self.field, self.message = str(where), field, message
        super().__init__(f"{where}: {field}: {message}" if field else f"{where}: {message}")


def content(path: Path) -> bytes:
    if not path.is_file():
        raise Problem(path, "", "there is no such file")
    if path.stat().st_size > _LARGEST:
        raise Problem(path, "", f"has more than {_LARGEST >> 20} MB")
    return path.read_bytes()


def text(path: Path) -> str:
    try:
        return content(path).decode()
    except UnicodeDecodeError as error:
        raise Problem(path, "", f"is not UTF-8 text: {error.reason} at byte {error.start}") from None


def files_under(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """All files of a folder by their path in it, in order; caches of Python are none of the task."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {prefix + path.relative_to(folder).as_posix(): content(path) for path in found}


def tasks_below(path: Path, name: str, read: Callable[[Path, str], Task]) -> Iterator[Task | Problem]:
    """What `read(folder, id)` makes of each folder at `path` or below that holds a file of this name, in order."""
    found = sorted(path.rglob(name))
    if not found:
        yield Problem(path, "", f"holds no {name}")
    for folder in (file.parent for file in found):
        try:
            yield read(folder, folder.name if folder == path else folder.relative_to(path).as_posix())
        except Problem as problem:
            yield problem


class Fields:
    """A table of a file, asked for its values by name; a wrong type is a `Problem`."""

    def __init__(self, where: str | Path, table: Any, name: str = ""):
        if not isinstance(table, Mapping):
            raise Problem(where, name, f"must be a table of named values, not {table!r:.60}")
        self.where, self.name, self._table = where, name, table

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def problem(self, key: str, message: str) -> Problem:
        return Problem(self.where, self.path(key), message)

    def has(self, *keys: str) -> str | None:
        """The first of these that is there and is not null."""
        return next((key for key in keys if self._table.get(key) is not None), None)

    def any(self, key: str) -> Any:
        return self._table.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._table.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.problem(key, "is missing" if value is None else f"must be text, not {value!r:.60}")
        return value

    def number(self, key: str, default: float, least: float = 0.0) -> float:
        value = self._table.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            raise self.problem(key, f"must be a number of at least {least:g}, not {value!r:.60}")
        return float(value)

    def choice(self, key: str, default: str, *allowed: str) -> str:
        value = self.text(key, default)
        if value not in allowed:
            raise self.problem(key, f"must be one of {', '.join(allowed)}, not {value!r:.60}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._table.get(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.problem(key, f"must be a list of texts, not {value!r:.60}")
        return tuple(value)

    def table(self, key: str) -> "Fields":
        value = self._table.get(key)
        return Fields(self.where, {} if value is None else value, self.path(key))

    def items(self) -> Any:
        return self._table.items()
