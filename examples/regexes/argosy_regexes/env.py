import random
from itertools import islice

import regex
from argosy.envs import Grade, ToolCall, ToolEnv, ToolError, tool

SETS = {r"\d": "0123456789", "[a-f]": "abcdef", "[xyz]": "xyz", "[A-Z]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "-": "-"}
COUNTS = {"": (1, 1), "{2}": (2, 2), "+": (1, 4), "?": (0, 1)}
SHOWN, HIDDEN = 3, 20


class Regexes(ToolEnv):
    """Find the pattern that matches every line of one list and none of the other; hidden lines judge."""

    system = "Write one regular expression that matches every whole line of YES, and no line of NO."
    max_turns = 6

    def __init__(self, pieces: int = 2):
        self.pieces = pieces

    def setup(self, seed, options):
        rng = random.Random(seed)
        self.wanted = self.draw(rng)
        self.yes = [self.line(self.wanted, rng) for _ in range(SHOWN + HIDDEN)]
        others = (self.line(self.draw(rng), rng) for _ in range(10_000))
        unlike = (line for line in others if not self.fits(self.pattern(self.wanted), line))
        self.no = list(islice(unlike, SHOWN + HIDDEN))
        self.answer = ""
        return "\n".join(["YES", *self.yes[:SHOWN], "NO", *self.no[:SHOWN]])

    @tool
    def submit(self, pattern: str) -> str:
        """Hand in a pattern; if it is wrong about a line that you see, you hear which, and may try again.

        Args:
            pattern: a regular expression
        """
        self.answer = pattern
        wrong = [f"{line!r} is in YES" for line in self.yes[:SHOWN] if not self.fits(pattern, line)]
        wrong += [f"{line!r} is in NO" for line in self.no[:SHOWN] if self.fits(pattern, line)]
        if not wrong:
            self.finish()
        return wrong[0] if wrong else "right, as far as you see"

    def grade(self):
        lines = [(line, True) for line in self.yes[SHOWN:]] + [(line, False) for line in self.no[SHOWN:]]
        try:
            right = sum(self.fits(self.answer, line) == wanted for line, wanted in lines) / len(lines)
        except ToolError:
            right = 0.0
        return Grade(float(right == 1.0), {"lines": right})

    def expert(self, rng):
        """Guesses, one time in three right."""
        return lambda messages: str(
            ToolCall("submit", {"pattern": self.pattern(self.wanted if rng.random() < 1 / 3 else self.draw(rng))})
        )

    def fits(self, pattern, line):
        try:
            return len(pattern) < 100 and regex.fullmatch(pattern, line, timeout=0.2) is not None
        except (regex.error, TimeoutError) as error:  # the model's mistake, whichever it is
            raise ToolError(f"{type(error).__name__}: {error}") from None

    def draw(self, rng):
        return [(rng.choice(list(SETS)), rng.choice(list(COUNTS))) for _ in range(self.pieces)]

    def pattern(self, pieces):
        return "".join(kind + count for kind, count in pieces)

    def line(self, pieces, rng):
        return "".join(rng.choice(SETS[kind]) for kind, count in pieces for _ in range(rng.randint(*COUNTS[count])))
