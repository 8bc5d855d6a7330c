"""What every sandbox can do, whichever back end runs it: code of others runs here and can harm nothing but itself.

Invariant: every call ends, at its own deadline (the whole process tree is killed) or a few seconds later (the sandbox
is). After a call that did not end properly the sandbox is dead and says so; it never answers one call with the result
of another. What agents cause is a `Result` or an OSError; only a sandbox that is lost raises an `InfrastructureError`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .spec import DEFAULT_SPEC, Result, SandboxSpec


class Sandbox(ABC):
    """Made by `open`. To know: `exec`, `write`, `read`. One call at a time; concurrent callers wait for each other.

    Paths are absolute or relative to `spec.workdir`.
    """

    spec: SandboxSpec

    @classmethod
    async def open(cls, spec: SandboxSpec = DEFAULT_SPEC) -> "Sandbox":
        """Start one on the back end of `spec`; `SandboxUnavailable` says what to install or to switch on."""
        if spec.backend == "docker":
            from .docker import DockerSandbox

            return await DockerSandbox.open(spec)
        from .bubblewrap import BubblewrapSandbox

        return await BubblewrapSandbox.open(spec)

    @abstractmethod
    async def exec(self, command: str, timeout: float = 60.0, fresh: bool = False) -> Result:
        """Run a command in the sandbox's bash: `cd`, variables and functions carry over to the next.

        Standard input is empty. At the deadline every process of the sandbox is killed, and the next command gets a new
        shell; so it does after `exit`. A process left in the background lives on and delays nothing. `fresh` takes a
        new shell right away, free of whatever was defined in the old one: what grades an agent wants that.
        """

    @abstractmethod
    async def write(self, path: str, content: str | bytes, executable: bool = False) -> None:
        """Write a file; folders are made. OSError as `open` would raise it."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Read a regular file of at most `limits.file_size`. OSError as `open` would raise it."""

    @abstractmethod
    async def snapshot(self, paths: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> bytes:
        """A tar of these paths (None: the workdir), for `restore`, here or in another sandbox.

        It holds regular files, folders and links (never what they point to), named relative to the workdir, or absolute
        where they lie outside; no fifos, no devices. Paths that do not exist are left out, and so is what matches a
        glob of `exclude` ("tests/**", "**/conftest.py"), relative to the workdir. OSError (EFBIG) beyond `limits.disk`.
        """

    @abstractmethod
    async def restore(self, tar: bytes) -> None:
        """Put back what `snapshot` took, over what is there; files that are not in the tar stay.

        No link is ever followed on the way: one in place of a folder is replaced. ValueError for a tar that `snapshot`
        would not make (a name with "..", a device); then nothing was written.
        """

    @abstractmethod
    async def reset(self) -> None:
        """Kill all processes and undo all changes to files; `SandboxGone` if it cannot be made clean."""

    @abstractmethod
    async def close(self) -> None:
        """End it and wait until it is gone; may be called twice."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, without waiting; may be called twice."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """It may be used: not closed, not broken, and its process runs."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """It is gone, with every process inside."""
