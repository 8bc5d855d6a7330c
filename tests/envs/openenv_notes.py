"""An OpenEnv server whose actions are MCP tools. Not imported by tests: run by them."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import CallToolAction, CallToolObservation, MCPEnvironment, Observation, State, create_app


class Notes(MCPEnvironment):
    def __init__(self) -> None:
        server = FastMCP("notes")
        self.notes: list[str] = []

        @server.tool
        def note(text: str) -> str:
            """Write a note."""
            if not text:
                raise ValueError("empty")
            self.notes.append(text)
            return f"{len(self.notes)} notes"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.notes.clear()
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Notes, CallToolAction, CallToolObservation, env_name="notes")
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
