"""A calendar of one day as an MCP server: `python server.py SEED`. It knows nothing of Argosy."""

import random
import sys
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

PEOPLE = ("ana", "bo", "cy", "di")
HOURS = range(9, 17)

server = MCPServer("calendar")
rng = random.Random(sys.argv[1] if len(sys.argv) > 1 else None)
busy = {person: sorted(rng.sample(HOURS, 3)) for person in PEOPLE}
meetings: list[int] = []


@server.tool()
def agenda(person: Annotated[str, Field(description="whose")]) -> str:
    """The hours at which somebody is busy."""
    if person not in busy:
        raise ToolError(f"nobody is called {person!r}; there are {', '.join(PEOPLE)}")
    return " ".join(map(str, busy[person]))


@server.tool()
def book(hour: Annotated[int, Field(description="when it begins, 9 to 16")]) -> str:
    """Book the meeting, of one hour."""
    if hour not in HOURS:
        raise ToolError(f"hours are {HOURS[0]} to {HOURS[-1]}")
    meetings.append(hour)
    return "booked"


@server.tool()
def booked() -> str:
    """All hours that were booked."""
    return " ".join(map(str, meetings))


if __name__ == "__main__":
    server.run()
