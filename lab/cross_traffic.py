"""Foreign flows between two hosts, as mlcc's paper injects them (§VI-A): TCP, no training job.

    python -m lab.cross_traffic serve PORT
    python -m lab.cross_traffic send ADDRESS PORT SEED

Every 2 seconds a flow of 0.2 to 2 seconds sends as fast as the kernel's TCP lets it. The sender
prints a line of JSON for each: when it began and ended, and the bytes that the other end has
acknowledged. Both end with standard input.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import threading
import time

from lab.sockets import bytes_acked

EVERY_S = 2.0
SHORTEST_S, LONGEST_S = 0.2, 2.0
_BLOCK = bytes(1 << 16)


def serve(port: int) -> None:
    """Take in what is sent."""

    def drain(connection: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        while connection.recv_into(buffer):
            pass

    with socket.create_server(("", port)) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            threading.Thread(target=drain, args=(connection,), daemon=True).start()


def send(address: str, port: int, seed: int) -> None:
    """A flow every ``EVERY_S``; the lengths are those of ``seed``."""
    draw = random.Random(seed)
    due_s = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
        due_s = max(due_s, time.monotonic()) + EVERY_S
        length_s = draw.uniform(SHORTEST_S, LONGEST_S)
        with socket.create_connection((address, port)) as connection:
            began_s = time.monotonic()
            while (left_s := began_s + length_s - time.monotonic()) > 0.0:
                connection.settimeout(left_s)
                try:
                    connection.send(_BLOCK)
                except TimeoutError:
                    break
            ended_s, moved = time.monotonic(), bytes_acked(connection)
        record = {"start": began_s, "end": ended_s, "bytes": moved}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
