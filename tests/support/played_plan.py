"""A discovery of hosts of an :class:`AnsweringNetwork`: its plan, its searches and its time."""

from __future__ import annotations

import heapq
import math
import random

from answering import AnsweringNetwork, PlayedPackets

from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.discover.plan import Plan, PlanRules
from crux_torch.network.discover.room import SECOND_S
from crux_torch.network.discover.tasks import Outcome, Peer, Search, Searched, Sounded, Task
from crux_torch.network.probe.discovery import Discovery

PORTS = range(49152, 65536)
SOUND_S = 0.3


def play(network: AnsweringNetwork, rules: PlanRules) -> tuple[Plan, float]:
    """Does everything that a plan orders; returns it, and the seconds that the hosts would take.

    Tasks are played one after the other, each from the time at which it begins. So the limits of
    routers hold for each host, but not for several hosts together.
    """
    now, ended_at = 0.0, -math.inf
    plan = Plan(network.hosts(network.address), rules, lambda: now)
    queue: list[tuple[float, str, list[Outcome]]] = []
    while plan.phase != "done":
        for host, task in plan.start():
            outcomes, until = _results(network, task, now)
            heapq.heappush(queue, (until, host, outcomes))
        if plan.phase == "done":
            break
        wake = ended_at + SECOND_S * 1.001
        if now < wake and (not queue or wake < queue[0][0]):
            now = wake  # what was sent in the last second left no room
            continue
        if not queue:
            break
        now, host, outcomes = heapq.heappop(queue)
        for outcome in outcomes:
            plan.take(outcome)
        plan.finish(host)
        ended_at = now
    return plan, now


def _results(network: AnsweringNetwork, task: Task, now: float) -> tuple[list[Outcome], float]:
    if isinstance(task, Search):
        return _searched(network, task, now)
    outcomes: list[Outcome] = []
    for peer in task.peers:
        sounded = _sounded(network, task.source, peer, now)
        outcomes.append(sounded)
        now += max(SOUND_S, sounded.sent / task.rate_per_s)
        if sounded.near and task.stop_at_near:
            break
    return outcomes, now


def _sounded(network: AnsweringNetwork, source: Peer, peer: Peer, now: float) -> Sounded:
    hops: list[str | None] = []
    flow = source.address, peer.address, PORTS[0]
    while (address := network.heard(flow, len(hops) + 1, now)) != peer.address:
        hops.append(address)
    return Sounded(source, peer, len(hops), tuple(hops), sent=len(hops) + 1)


def _searched(network: AnsweringNetwork, task: Search, now: float) -> tuple[list[Outcome], float]:
    source, peer = task.source, task.peer
    packets = PlayedPackets(network, source.address, peer.address, now)
    routers = len(network.hops_of((source.address, peer.address, PORTS[0])))
    ports = random.Random(1).sample(PORTS, 1024)
    search = Discovery(packets, packets.clock, ports, range(1, routers + 1), task.rules)
    search.run(now + task.time_limit_s)
    confidence, sure, hops = search.confidence, set(search.quiet), search.hops
    changed = search.recheck(now + task.time_limit_s).changed
    answering = {ttl for answers in hops.values() for ttl, address in answers if address}
    paths: dict[tuple[str | None, ...], list[int]] = {}
    for port, answers in hops.items():
        found = tuple(address for _, address in answers)
        if port in sure or all(address or ttl not in answering for ttl, address in answers):
            paths.setdefault(found, []).append(port)
    ends = source.host, source.address, peer.host, peer.address
    seen = tuple(SeenPath(found, tuple(given[:8])) for found, given in paths.items())
    pair = SeenPair(*ends, seen, confidence, changed > 0)
    return [Searched(source, peer, pair, sent=search.sent)], packets.now
