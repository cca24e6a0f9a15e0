"""The traffic class of a control connection."""

from __future__ import annotations

import socket

#: A class is the upper six bits of a byte whose others are the network's.
_ECN_BITS = 2


def mark(connection: socket.socket, dscp: int) -> None:
    """Send with this DSCP value, 0 to 63; what a listener accepts sends with it, too.

    Raises:
        OSError: the system refuses it.
    """
    if connection.family == socket.AF_UNIX:
        return  # it sends nothing
    # A socket of IPv6 may speak IPv4, too.
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << _ECN_BITS)
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << _ECN_BITS)
