"""An OpenEnv server with its own helper: a number to guess; some numbers break it. Run by tests, not imported."""

import os
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class GuessNumberAction(Action):
    """Guess the number."""

    number: int = Field(ge=0, description="your guess")


class Told(Observation):
    told: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 10, **kwargs: Any) -> Told:
        self.number, self._state = (seed or 0) % most, State()
        if most == 1:
            return Told(told="nothing to guess", done=True)
        return Told(told=f"below {most}" if most != 2 else f"below {time.time()}")

    def step(self, action: GuessNumberAction, timeout_s: float | None = None, **kwargs: Any) -> Told:
        if action.number == 100:
            raise RuntimeError("the world has broken")
        if action.number == 200:
            time.sleep(30)
        if action.number == 300:
            os._exit(3)
        right = action.number == self.number
        return Told(told="yes" if right else "no", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    print("guess server begins", flush=True)
    app = create_app(Guess, GuessNumberAction, Told, env_name="guess", max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
