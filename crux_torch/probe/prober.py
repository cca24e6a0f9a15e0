"""Which source ports lead over which path to a peer, found by probing.

Probes expire before the peer, and the routers there say who they are (docs/probing.md).
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from crux_torch.fabric.ecmp import ROCE_V2_PORT
from crux_torch.probe.depth import Depth, resolve, sound, source_address
from crux_torch.probe.discovery import Discovery, Rules
from crux_torch.probe.error_queue import ErrorQueue
from crux_torch.probe.live_trace import ConnectionTrace, trace_connection
from crux_torch.probe.packets import ProbeError
from crux_torch.probe.path_map import PathMap, Transport

__all__ = ["ConnectionTrace", "PathMap", "Rules", "probe", "trace_connection"]

#: The default; a Clos of five stages has six hops.
MAX_TTL = 16
#: Source ports of RoCEv2: what rdma-core's ibv_flow_label_to_udp_sport() can give.
ROCE_PORTS = range(0xC000, 0x10000)


def probe(
    destination: str,
    port: int,
    protocol: Transport = "tcp",
    *,
    source: str | None = None,
    ports: Iterable[int] | None = None,
    ttls: Sequence[int] | None = None,
    max_ttl: int = MAX_TTL,
    rules: Rules | None = None,
    seed: int | None = 0,
    watch: Callable[[Discovery], None] | None = None,
) -> PathMap:
    """Find the paths to ``destination``, and source ports that lead over each.

    Args:
        destination: address or name of the peer.
        port: destination port of the connections in question; RoCEv2's is 4791.
        source: address of this host that they leave from; default: by the routes.
        ports: source ports to draw from; by default this host's ephemeral ones for TCP and
            RoCEv2's for UDP.
        ttls: hops to ask about; by default all routers on the way, counted first. A TTL that
            reaches the peer makes a TCP probe connect to it; the connection is reset at once.
        max_ttl: hops to count at most.
        seed: of the order in which ports are drawn, so that a search can be repeated; None: as
            they come in ``ports``.
        watch: called with the search after each step.

    Raises:
        ProbeError: unknown name, no route, no answer from anyone, or not permitted.
        ValueError: arguments out of bounds.
    """
    if not 1 <= port <= 65535 or not 1 <= max_ttl <= 64:
        raise ValueError(f"port {port}, max_ttl {max_ttl}; expected 1 to 65535 and 1 to 64")
    if ttls is not None and (not ttls or not all(1 <= ttl <= 64 for ttl in ttls)):
        raise ValueError(f"ttls {ttls!r}; expected some of 1 to 64")
    rules = rules or Rules()
    to = resolve(destination)
    start = time.monotonic()
    until = start + rules.time_limit_s
    leaves = source_address(to) if source is None else resolve(source)
    choice = list(ports) if ports is not None else list(default_ports(protocol, port))
    if seed is not None:
        random.Random(seed).shuffle(choice)
    depth = Depth() if ttls is not None else sound(leaves, to, max_ttl, rules.answer_wait_s, until)
    asked = sorted(set(ttls)) if ttls is not None else depth.ttls
    with ErrorQueue(leaves, to, protocol, port) as packets:
        search = Discovery(packets, time.monotonic, choice, asked, rules, watch)
        search.run(until)
        confidence, hops = search.confidence, search.hops
        repeated, changed = search.recheck(until)
    if asked and not any(address for answers in hops.values() for _, address in answers):
        raise ProbeError(
            errno.ETIMEDOUT,
            f"no router answered for {protocol} to {to} port {port} at the TTLs "
            f"{', '.join(map(str, asked))} ({search.sent} probes): they don't report expired "
            "packets, or a firewall drops these probes or the answers (ICMP time exceeded)",
        )
    return PathMap(
        source=leaves,
        destination=to,
        protocol=protocol,
        port=port,
        hops=hops,
        inferred=search.inferred,
        distance=depth.distance,
        confidence=confidence,
        ended=search.ended,
        repeated=repeated,
        changed=changed,
        sent=depth.sent + search.sent,
        answered=depth.answered + search.answered,
        seconds=time.monotonic() - start,
    )


def default_ports(protocol: Transport, port: int) -> range:
    """Source ports that connections to ``port`` have: this host's ephemeral ones, or RoCEv2's."""
    if protocol == "udp" and port == ROCE_V2_PORT:
        return ROCE_PORTS
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    return range(low, high + 1)
