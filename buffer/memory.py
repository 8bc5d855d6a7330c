"""Memory for what is read together: one large piece, which is used again once nobody holds an array of it.

A batch of long trajectories is a hundred megabytes. Fresh from the system it comes in pages of 4 kB, each with a fault
of up to 2 us: more than everything else that reading takes. For a large array numpy asks for huge pages.
"""

import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE = 1 << 22  # bytes from which on numpy asks for huge pages
SPARE = 1.25  # the next batch is a little larger; what is not touched costs nothing
PIECES = 2  # a caller still holds the last batch when it asks for the next
ALIGNMENT = 64
UNUSED = 3  # references to a piece: the list's, the loop's and that of the argument


class Memory:
    """Gives away a piece in any number of arrays, and after that what numpy finds. It lives as long as they do."""

    def __init__(self, piece: NDArray[np.uint8] | None = None) -> None:
        self._left = np.empty(0, np.uint8) if piece is None else piece[:]

    def take(self, n: int, dtype: Any) -> NDArray[Any]:
        """An array of `n` items, not initialised."""
        size = np.dtype(dtype).itemsize * n
        if size > len(self._left):
            return np.empty(n, dtype)
        taken, self._left = self._left[:size], self._left[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken.view(dtype)


class Memories:
    """Thread-safe. An array keeps the piece that it lies in from being used again."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def memory(self, n_bytes: int) -> Memory:
        """Memory of at least so many bytes."""
        with self._lock:
            for piece in self._pieces:
                if len(piece) >= n_bytes and sys.getrefcount(piece) == UNUSED:
                    return Memory(piece)
            piece = np.empty(max(int(SPARE * n_bytes), HUGE), np.uint8)
            self._pieces = [piece, *self._pieces][:PIECES]
            return Memory(piece)
