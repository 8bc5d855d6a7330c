"""Where the files of a run are. All of them are in one folder; remove it and the run never was."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes


@dataclass(frozen=True)
class RunPaths:
    root: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe of the run."""
        return self.root / "recipe.yaml"

    @property
    def model(self) -> Path:
        """The model that was made from scratch, if any."""
        return self.root / "model"

    @property
    def demonstrations(self) -> Path:
        return self.root / "demonstrations.archive"

    @property
    def configs(self) -> Path:
        """What each process was started with."""
        return self.root / "configs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def redis(self) -> Path:
        """Redis' append-only file."""
        return self.root / "redis"

    @property
    def redis_socket(self) -> Path:
        """Beside the run's other files, or under the temporary folder where that path is too long for a socket."""
        inside = self.redis / "redis.sock"
        if len(os.fsencode(inside)) <= LONGEST_SOCKET_PATH:
            return inside
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"argosy-{os.getuid()}-{digest}.sock"

    @property
    def redis_url(self) -> str:
        return f"unix://{quote(str(self.redis_socket))}"

    @property
    def identity(self) -> Path:
        """What tells this run from others of its name, in a Redis that it may share with them."""
        return self.root / "identity"

    @property
    def metrics(self) -> Path:
        """One line per learner step."""
        return self.root / "metrics.jsonl"

    @property
    def actors(self) -> Path:
        """One file per actor with a line a second."""
        return self.root / "actors"

    @property
    def samples(self) -> Path:
        """Trajectories with what the learner thought of their tokens."""
        return self.root / "samples"

    def evaluation(self, when: str, source: str) -> Path:
        """What an evaluation, "before" or "after", found."""
        return self.root / "evaluations" / f"{when}-{source}.json"

    @property
    def journal(self) -> Path:
        """What the supervisor did: stages begun and finished, processes started, ended and restarted."""
        return self.root / "journal.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"


def write_whole(path: Path, text: str) -> None:
    """The file has all of the text or does not appear, whatever happens meanwhile."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
