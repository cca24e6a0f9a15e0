"""Frames over a blocking socket, each with a deadline."""

from __future__ import annotations

import socket
import time

from crux_torch.store.frames import LENGTH_BYTES

#: How an answer begins that is no frame: as a length it would be a gigabyte. And what to say of it.
_HTTP_BEGIN = b"HTTP"
HTTP = "an HTTP server answers"
#: Seconds until a frame that came in part is looked at again: its sender may send single bytes, and
#: each look takes the GIL.
PART_S = 0.001


class FrameTooLong(ValueError):
    """A frame of ``size`` bytes, which is over a limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes, limit {limit}")
        self.size = size


class FrameSocket:
    """Sends and receives frames over ``connected``. Deadlines are by ``time.monotonic``."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, data: bytes, deadline_s: float) -> None:
        """Send ``data``; raises OSError, which a TimeoutError is."""
        self._socket.settimeout(_left(deadline_s))
        self._socket.sendall(data)

    def receive(self, limit: int, deadline_s: float) -> bytes:
        """The next frame without its length.

        Raises:
            OSError: the connection failed, or the deadline has passed.
            EOFError: the other side closed it.
            FrameTooLong: it is longer than ``limit``.
        """
        head = self._bytes(LENGTH_BYTES, deadline_s)
        size = int.from_bytes(head, "big")
        if head == _HTTP_BEGIN:
            raise ValueError(HTTP)
        if size > limit:
            raise FrameTooLong(size, limit)
        return self._bytes(size, deadline_s)

    def has_ended(self) -> bool:
        """Whether the other side is known to be gone."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _bytes(self, size: int, deadline_s: float) -> bytes:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            self._socket.settimeout(_left(deadline_s))
            count = self._socket.recv_into(view[got:])
            if not count:
                raise EOFError("it closed the connection")
            got += count
            if got < size:
                time.sleep(PART_S)
        return bytes(data)


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
