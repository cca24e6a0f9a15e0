"""The probes of one host in a discovery: counts routers, and searches paths to its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from crux_torch.network.discover.fragment import MAX_HOPS, MAX_PATHS, SeenPair, SeenPath
from crux_torch.network.discover.tasks import Outcome, Peer, Search, Searched, Sound, Sounded, Task
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.live_trace import sound
from crux_torch.network.probe.packets import ProbeError
from crux_torch.network.probe.prober import MAX_TTL, PathMap, probe

ANSWER_WAIT_S = 0.3
#: Longest time for the routers between two addresses.
SOUND_S = 10.0
#: Ports of a path that are handed on: as many as a fragment holds.
PORTS = 64


def survey(task: Task, sleep: Callable[[float], None] = time.sleep) -> Iterator[Outcome]:
    """Does ``task`` and yields what it finds, each as soon as it is known."""
    if isinstance(task, Search):
        yield searched(task)
        return
    for peer in task.peers:
        began = time.monotonic()
        found = sounded(task, peer)
        yield found
        if found.near and task.stop_at_near:
            return
        sleep(max(0.0, began + found.sent / task.rate_per_s - time.monotonic()))


def sounded(task: Sound, peer: Peer) -> Sounded:
    """Returns the number of routers to ``peer``, and who answered."""
    source = task.source
    until = time.monotonic() + SOUND_S
    try:
        depth = sound(source.address, peer.address, MAX_TTL, ANSWER_WAIT_S, until)
    except ProbeError as error:
        return Sounded(source, peer, problem=str(error)[:1024])
    last = max(depth.routers, default=0)
    routers = last if depth.distance is None else max(last, depth.distance - 1)
    hops = tuple(depth.routers.get(ttl) for ttl in range(1, routers + 1))[:MAX_HOPS]
    return Sounded(source, peer, routers, hops, sent=depth.sent)


def searched(task: Search) -> Searched:
    """Returns all paths to the peer."""
    source, peer = task.source, task.peer
    try:
        found = probe(peer.address, ROCE_V2_PORT, "udp", source=source.address, rules=task.rules)
    except ProbeError as error:
        return Searched(source, peer, problem=str(error)[:1024])
    pair = seen_pair(source, peer, found)
    return Searched(source, peer, pair, sent=found.sent, seconds=min(found.seconds, 3600.0))


def seen_pair(source: Peer, peer: Peer, found: PathMap) -> SeenPair:
    """Returns the paths that a search found; silent routers are hops without answer.

    Ports for which an answer may have been lost are left out.
    """
    end = found.distance - 1 if found.distance is not None else 0
    quiet = set(found.quiet)
    sure = dict(found.paths)
    for hops, ports in found.partial.items():
        if kept := tuple(port for port in ports if port in quiet):
            sure[hops] = kept
    paths = []
    for hops, ports in sure.items():
        answers = tuple(address for _, address in hops)
        answers += (None,) * (end - len(answers))
        paths.append(SeenPath(answers[:MAX_HOPS], ports[:PORTS]))
    return SeenPair(
        src=source.host,
        src_address=source.address,
        dst=peer.host,
        dst_address=peer.address,
        paths=tuple(paths[:MAX_PATHS]),
        confidence=found.confidence,
        sprays=found.changed > 0,
    )
