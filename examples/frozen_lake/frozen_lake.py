"""A Gymnasium game played by tool calls: cross a frozen lake, another one for each seed, without falling in."""

from collections import deque
from typing import Literal

from argosy.envs import TextGame, ToolCall, tool
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}  # in the order of the game's actions


class FrozenLake(TextGame):
    """Find the way from S to G on the ice (F), around the holes (H)."""

    game = "FrozenLake-v1"
    settings = {"is_slippery": False}
    system = "Walk from S to G over F. H is a hole. [ ] is you."
    max_turns = 16

    def __init__(self, size: int = 4):
        self.size = size

    def setup(self, seed, options):
        return self.begin(seed, desc=generate_random_map(self.size, seed=seed))

    @tool
    def move(self, direction: Literal["left", "down", "right", "up"]) -> str:
        """Walk one field.

        Args:
            direction: where to
        """
        return self.play(list(MOVES).index(direction))

    def expert(self, rng):
        """Walks the shortest way; now and then it takes a wrong turn."""

        def say(messages):
            wrong = rng.random() < 0.1
            return str(ToolCall("move", {"direction": rng.choice(list(MOVES)) if wrong else self.way()[0]}))

        return say

    def way(self):
        """The shortest, breadth first."""
        lake, seen = self.playing.desc, set()
        ways = deque([(divmod(int(self.playing.s), self.size), [])])
        while True:
            (row, column), way = ways.popleft()
            inside = 0 <= row < self.size and 0 <= column < self.size
            if not inside or lake[row, column] == b"H" or (row, column) in seen:
                continue
            if lake[row, column] == b"G":
                return way
            seen.add((row, column))
            ways += [((row + down, column + right), [*way, name]) for name, (down, right) in MOVES.items()]
