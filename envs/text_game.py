"""A Gymnasium environment as one with tools: the model acts by calls and reads what the game prints.

Invariant: the game is seeded with the episode's seed, every move is one step of it, and the grade is the sum of its
rewards. A game that has ended, or cut itself off, takes no more moves: the episode is over with it.
"""

import re
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from .tool_env import Grade, ToolEnv

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


class TextGame(ToolEnv):
    """Subclass it: name the `game`, write a tool for each kind of move that returns `self.play(action)`."""

    game: str = ""
    """Id in Gymnasium's registry."""

    settings: dict[str, Any] = {}
    """What `gymnasium.make` is told besides."""

    __game: gymnasium.Env[Any, Any] | None = None
    __return = 0.0

    def setup(self, seed: int, options: dict[str, Any]) -> str:
        """The opening is the game's first picture; override it to say more, or to choose settings by the seed."""
        return self.begin(seed)

    def begin(self, seed: int, **settings: Any) -> str:
        """Make and seed the game; what it shows at first."""
        self.close_episode()
        entry = gymnasium.spec(self.game).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        rendered = {"render_mode": "ansi"} if "ansi" in modes else {}
        self.__game = gymnasium.make(self.game, disable_env_checker=True, **{**rendered, **self.settings, **settings})
        self.__return = 0.0
        observation, _ = self.__game.reset(seed=seed)
        return self.show(observation)

    def play(self, action: Any) -> str:
        """One step of the game; what it shows afterwards."""
        assert self.__game is not None, "call begin() in setup()"
        observation, reward, terminated, truncated, _ = self.__game.step(action)
        self.__return += float(reward)
        if terminated or truncated:
            self.finish()
        return self.show(observation)

    def show(self, observation: Any) -> str:
        """What the model reads: the game's own text picture, [marked] where it uses colours. Override at will."""
        assert self.__game is not None
        picture = self.__game.render() if self.__game.render_mode == "ansi" else None
        return _COLOUR.sub(r"[\2]", picture).strip("\n") if isinstance(picture, str) else str(observation)

    @property
    def playing(self) -> Any:
        """The game itself, without wrappers; for experts and graders."""
        assert self.__game is not None
        return self.__game.unwrapped

    def grade(self) -> Grade:
        return Grade(self.__return)

    def close_episode(self) -> None:
        if self.__game is not None:
            self.__game.close()
            self.__game = None
