"""Everything this folder raises on purpose.

ActorError
├── EngineFailed         the engine server could not start, died, or serves weights that it should not
├── EngineUnavailable    no engine answered in time: the task is given back and nothing is counted against it
├── EngineRefused        the engine will never accept this request: a bug or a wrong setting (also a ValueError)
├── OutOfTime            a deadline of ours passed; an episode that it ends is graded (also a TimeoutError)
├── CannotContinue       an unfinished episode cannot be restored: it starts over
├── LeaseLost            the attempt is another worker's by now, or dropped: its episode ends here
└── TooManyFailures      episode after episode failed: something is broken that retrying does not mend
"""


class ActorError(Exception):
    """The root of this folder's errors."""


class EngineFailed(ActorError):
    pass


class EngineUnavailable(ActorError):
    pass


class EngineRefused(ActorError, ValueError):
    pass


class OutOfTime(ActorError, TimeoutError):
    pass


class CannotContinue(ActorError):
    pass


class LeaseLost(ActorError):
    pass


class TooManyFailures(ActorError):
    pass
