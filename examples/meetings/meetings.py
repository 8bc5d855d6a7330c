"""Tools from an MCP server: find an hour at which nobody is busy, and book it. Needs `pip install "argosy[mcp]"`."""

import random
from pathlib import Path

from argosy.envs import Grade, McpEnv, ToolCall

PEOPLE = ("ana", "bo", "cy", "di")
HOURS = range(9, 17)


class Meetings(McpEnv):
    """Book the first hour at which two people are free."""

    command = ("python", str(Path(__file__).with_name("server.py")))
    offered = ("agenda", "book")  # `booked` is for the grade
    system = "Book one hour, the first at which both are free, from 9 to 16."
    max_turns = 6

    async def setup(self, seed, options):
        await self.connect(str(seed))
        self.people = random.Random(seed).sample(PEOPLE, 2)
        self.free = sorted(set(HOURS) - {hour for person in self.people for hour in await self.busy(person)})
        return " ".join(self.people)

    def reply(self, content):
        """Whoever says something without a call is done."""
        self.finish()
        return "thank you"

    async def grade(self):
        booked = [int(hour) for hour in (await self.call("booked")).split()]
        return Grade(float(booked == self.free[:1]), {"free": float(set(booked) <= set(self.free))})

    async def busy(self, person):
        return [int(hour) for hour in (await self.call("agenda", person=person)).split()]

    def expert(self, rng):
        """Looks at both agendas; now and then it miscounts."""
        calls = [ToolCall("agenda", {"person": person}) for person in self.people]
        hour = self.free[0] if rng.random() < 0.7 else rng.choice(HOURS)
        said = iter([*map(str, calls), str(ToolCall("book", {"hour": hour})), "Done."])
        return lambda messages: next(said)
