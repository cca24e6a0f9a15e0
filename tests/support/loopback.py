"""Ports and addresses of this host."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens to, below those that Linux gives to the ends of connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
