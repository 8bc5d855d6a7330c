"""What can go wrong in an environment, and whose fault it is.

    EnvError
    ├── ToolError               the model's mistake: the tool answers with this text and the episode goes on
    ├── UnknownEnvironment      the user's mistake: no such environment (also a ValueError)
    ├── UnusablePackage         the user's mistake: no tasks can be made from this package (also a ValueError)
    ├── ReplayDiffers           the same calls did not give the same answers: a checkpoint cannot be gone on from
    └── InfrastructureError     nobody's merit: the attempt is invalid and is tried again, never scored 0
        ├── SandboxUnavailable  a sandbox cannot be started here; the text says how to fix it
        ├── SandboxGone         a sandbox died or stopped answering in the middle of something
        └── InvalidGrade        grading left no readable reward

The agent's own failures (its code crashed, ran too long, used too much memory) are ordinary results, not errors.
"""


class EnvError(Exception):
    """Base of everything this folder raises on purpose."""


class ToolError(EnvError):
    """Raise it inside a tool to tell the model what it did wrong; keep the text short, the model reads it."""


class UnknownEnvironment(EnvError, ValueError):
    """The name is neither registered nor an import path."""


class ReplayDiffers(EnvError):
    """An episode begun again answered a call differently; the text says which, and how."""


class UnusablePackage(EnvError, ValueError):
    """No tasks can be made from it; the text says why and what to do."""


class InfrastructureError(EnvError):
    """The episode cannot be judged; whoever runs it gives the attempt back and lets it be tried again."""


class SandboxUnavailable(InfrastructureError):
    """A sandbox could not be started; the text names the cause and the fix."""


class SandboxGone(InfrastructureError):
    """A running sandbox died or missed its deadline; what it held is lost."""


class InvalidGrade(InfrastructureError):
    """Grading did not produce one finite number."""
