"""What is kept of a command's output, however much there is; the Docker back end keeps as much."""


class HeadAndTail:
    """The first and the last half of the allowance; what lies between is counted and let go."""

    def __init__(self, allowance):
        self._half = allowance // 2
        self._head, self._tail, self._size = bytearray(), bytearray(), 0

    def add(self, piece):
        self._size += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: len(self._tail) - self._half]

    def result(self):
        tail = self._tail[max(0, len(self._tail) - self._half) :]
        cut = self._size - len(self._head) - len(tail)
        if not cut:
            return bytes(self._head + tail), False
        return b"".join((self._head, b"\n... [%d bytes cut] ...\n" % cut, tail)), True
