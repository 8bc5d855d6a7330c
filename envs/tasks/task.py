"""A coding task, wherever it came from: what the agent is told and given, and how its work is judged.

Invariant: a task is complete. Loaders (one file per format beside this one) read and check everything once; what plays
or grades a task asks neither the disk nor the network for more of it, but for the image of its sandbox. What the agent
must not see (`Grading.files`, `Stage.solution`) is in no field that reaches the agent's sandbox.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..sandboxes import DEFAULT_SPEC, SandboxSpec

Files = Mapping[str, bytes]
"""Contents by path, absolute or relative to the sandbox's workdir. Scripts are run by name of their shell."""


@dataclass(frozen=True)
class ExitStatus:
    """Reward 1 when the command exits with 0, else 0."""


@dataclass(frozen=True)
class RewardFile:
    """The command leaves its reward in `folder`: reward.json (flat, finite numbers; "reward" is the reward, else their
    mean), or reward.txt with one number. Its exit status counts for nothing (Harbor)."""

    folder: str = "/logs/verifier"


@dataclass(frozen=True)
class NamedTests:
    """Reward 1 when every test of both lists is reported passed by the command's log (SWE-bench)."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    report: Literal["pytest", "unittest", "junit"] = "pytest"


@dataclass(frozen=True)
class TestOutcomes:
    """Reward 1 when the outcome of each test equals what is expected of it, no more and no fewer (R2E-Gym)."""

    __test__ = False  # pytest, this is not a test
    expected: Mapping[str, str]


Verdict = ExitStatus | RewardFile | NamedTests | TestOutcomes


@dataclass(frozen=True)
class Grading:
    """How the work of a stage is judged: in a clean sandbox, unless `shared`."""

    command: str
    """A shell command, run in the workdir."""
    files: Files = field(default_factory=dict)
    """Arrive after the agent is done, over whatever is in their place."""
    verdict: Verdict = ExitStatus()
    artefacts: tuple[str, ...] = (".",)
    """Paths of the agent's sandbox that are carried into the clean one."""
    protected: tuple[str, ...] = ()
    """Glob patterns, relative to the workdir: what the agent made of these is not carried over."""
    shared: bool = False
    """Grade where the agent worked, because the state of its machine is the work."""
    sandbox: SandboxSpec | None = None
    """The clean sandbox, where it is not as the task's (Harbor's separate verifier with an image of its own)."""
    seconds: float = 600.0


@dataclass(frozen=True)
class Solution:
    """A reference: files that are written, then a command that is run. One of them may be empty."""

    files: Files = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True)
class Stage:
    instruction: str
    grading: Grading
    solution: Solution | None = None
    files: Files = field(default_factory=dict)
    """Given to the agent when the stage begins."""
    setup: str = ""
    """A shell command, run once after the stage's files are there; before the first stage, after the task's own."""
    least: float | None = None
    """A lower reward of this stage ends the task, as does one below the task's."""


@dataclass(frozen=True)
class Task:
    """Most have one stage; a task of several is played stage by stage in one sandbox."""

    id: str
    """Unique in its source, such as "exercism/two-fer"."""
    stages: tuple[Stage, ...]
    sandbox: SandboxSpec = DEFAULT_SPEC
    setup: str = ""
    """A shell command, run once after the first stage's files are there and before the agent starts."""
    combine: Literal["mean", "final"] = "final"
    """The reward of several stages."""
    least: float | None = None
    """A stage with a lower reward ends the task; what follows counts as 0."""
    seconds: float = 1800.0
    """The agent's time, over all stages."""
    family: str = ""
    """Tasks of one family are on the same side of every split; without one, a task stands for itself."""
    origin: str = ""
    """The file, and where in it, that this was read from; for messages."""
