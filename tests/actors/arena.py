"""Small environments that the tests play in; worker processes import them by path, as a user's would be."""

import asyncio
import dataclasses
import random

from argosy.envs import Grade, InfrastructureError, ToolEnv, tool


class Guess(ToolEnv):
    """Find a number below ten."""

    system = "Guess the number."
    max_turns = 4

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause

    def setup(self, seed, options):
        self.number, self.found = random.Random(seed).randrange(10), False
        return "It is below 10."

    @tool
    async def guess(self, number: int) -> str:
        """Guess the number."""
        await asyncio.sleep(self.pause)
        self.found = number == self.number
        if self.found:
            self.finish()
        return "found" if self.found else "higher" if number < self.number else "lower"

    async def reply(self, content):
        await asyncio.sleep(self.pause)
        return "Call guess."

    def grade(self):
        return Grade(float(self.found), {"found": float(self.found)})

    async def expert(self, rng):
        low, high = 0, 9

        def say(messages):
            nonlocal low, high
            answer = messages[-1]["content"]
            if answer == "higher":
                low = self.last + 1
            elif answer == "lower":
                high = self.last - 1
            self.last = (low + high) // 2
            return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {self.last}}}}}\n</tool_call>'

        return say


class Stuck(Guess):
    """Asks again and again, and in turn `turn` stops answering. What it answers depends on `mood`."""

    max_turns = 6

    def __init__(self, turn: int = 0, mood: str = "", pause: float = 0.0) -> None:
        super().__init__(pause)
        self.turn, self.mood = turn, mood

    def setup(self, seed, options):
        self.asked = 0
        return super().setup(seed, options) + self.mood

    async def act(self, calls, content="", error=None):
        self.asked += 1
        if self.asked == self.turn:
            await asyncio.sleep(3600)
        step = await super().act(calls, content, error)
        return dataclasses.replace(step, reward=0.25 * (self.asked == 2))


class Fickle(Stuck):
    """Never says the same twice."""

    async def reply(self, content):
        return f"Call guess, {random.SystemRandom().random()}."

    async def act(self, calls, content="", error=None):
        return await super().act(None, content)


class Fleeting(Fickle):
    """The same, and says so."""

    replayable = False


class Broken(Guess):
    """Has a bug, or loses its sandbox."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def reply(self, content):
        raise InfrastructureError("the sandbox is gone") if self.kind == "infrastructure" else KeyError("a bug")

    async def act(self, calls, content="", error=None):
        return await super().act(None, content)


class Clinging(Guess):
    """Cannot give back what it holds."""

    async def stop(self):
        if hasattr(self, "number"):  # start() stops what was before
            raise RuntimeError("the sandbox does not answer")


class Hanging(Guess):
    """Never answers a turn."""

    async def act(self, calls, content="", error=None):
        await asyncio.sleep(3600)
