"""Memory for what is read together, taken from the system in one piece.

A batch of long trajectories is a hundred megabytes. Piece by piece the system would hand it out in pages of 4 kB, each
with a fault of up to 2 us: more than everything else that reading takes. For one large array numpy asks for huge pages.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE = 1 << 22  # bytes from which on numpy asks for huge pages; what is not touched costs nothing
ALIGNMENT = 64


class Memory:
    """Gives away `n_bytes`, in any number of arrays, and after that what numpy finds. It lives as long as they do."""

    def __init__(self, n_bytes: int = 0) -> None:
        self._left = np.empty(max(n_bytes, HUGE) if n_bytes else 0, np.uint8)

    def take(self, n: int, dtype: Any) -> NDArray[Any]:
        """An array of `n` items, not initialised."""
        size = np.dtype(dtype).itemsize * n
        if size > len(self._left):
            return np.empty(n, dtype)
        taken, self._left = self._left[:size], self._left[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken.view(dtype)
