"""Hosts below leaf switches that play a plan of discovery: every task, its answers and its time."""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crux_torch.network.discover.fragment import SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.plan import Plan
from crux_torch.network.discover.room import SECOND_S
from crux_torch.network.discover.tasks import Outcome, Peer, Search, Searched, Sound, Sounded, Task
from crux_torch.network.probe.rules import draws_needed

#: Probes of one sounding.
PROBES = 4


def host_name(i: int) -> str:
    return f"h{i}"


def address_of(i: int, plane: int = 0) -> str:
    return f"10.{plane}.{i >> 8}.{i & 255}"


@dataclass
class SurveyWorld:
    """Hosts, the leaf of each, and spines that join all leaves.

    Attributes:
        leaf_of: leaf of each host.
        spines: spines between each two leaves; each takes an equal share of the ports.
        own_gateway: True if each host has a subnet of its own, and so a first hop of its own.
        outcomes: in the order in which they came.
        started: tasks in the order in which they began, with the time.
        expired: times of the probes that each router gets, if hosts ask the spines as fast as they
            may, and all that one asks within a second take one spine, at random.
    """

    leaf_of: Sequence[int]
    spines: int = 2
    own_gateway: bool = True
    planes: int = 1
    outcomes: list[Outcome] = field(default_factory=list)
    started: list[tuple[float, Task]] = field(default_factory=list)
    expired: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    now: float = 0.0

    @property
    def hosts(self) -> list[SeenHost]:
        return [
            SeenHost(
                host_name(i),
                tuple(SeenNic(f"eth{p}", (address_of(i, p),)) for p in range(self.planes)),
            )
            for i in range(len(self.leaf_of))
        ]

    def clock(self) -> float:
        return self.now

    def index(self, peer: Peer) -> int:
        return int(peer.host.removeprefix("h"))

    def first_hop(self, source: Peer) -> str:
        i = self.index(source)
        return f"10.100.0.{i}" if self.own_gateway else f"10.100.1.{self.leaf_of[i]}"

    def path(self, source: Peer, peer: Peer, port: int) -> tuple[str, ...]:
        """The routers' addresses on the way of a port."""
        a, b = self.leaf_of[self.index(source)], self.leaf_of[self.index(peer)]
        if a == b:
            return (f"10.101.0.{a}",)
        return f"10.101.0.{a}", f"10.102.0.{port % self.spines}", f"10.101.0.{b}"

    def results(self, task: Task) -> tuple[list[Outcome], float]:
        """Returns the findings of a task, and the seconds that it takes."""
        if isinstance(task, Search):
            hops = [self.path(task.source, task.peer, port) for port in range(self.spines)]
            draws = self.spines + draws_needed(self.spines, task.confidence)
            ends = (task.source.host, task.source.address, task.peer.host, task.peer.address)
            paths = tuple(
                SeenPath((self.first_hop(task.source), *each[1:]), (port + 1,))
                for port, each in enumerate(hops)
            )
            sent = draws * len(hops[0])
            found = Searched(
                task.source, task.peer, SeenPair(*ends, paths, task.confidence), sent=sent
            )
            return [found], sent / task.rate_per_s
        outcomes: list[Outcome] = []
        for peer in task.peers:
            routers = len(self.path(task.source, peer, 0))
            hops = (self.first_hop(task.source), *(None,) * (routers - 1))
            outcomes.append(Sounded(task.source, peer, routers, hops, sent=PROBES))
            if routers == 1 and task.stop_at_near:
                break
        return outcomes, PROBES * len(outcomes) / task.rate_per_s

    def play(
        self, plan: Plan, until: Callable[[SurveyWorld], bool] = lambda _: False
    ) -> SurveyWorld:
        """Run all tasks of ``plan``, or until ``until`` says stop after one of them."""
        queue: list[tuple[float, int, str, list[Outcome]]] = []
        number, ended_at = 0, -math.inf
        while plan.phase != "done":
            for host, task in plan.start():
                outcomes, seconds = self.results(task)
                heapq.heappush(queue, (self.now + seconds, number, host, outcomes))
                self._probe(task, self.now, seconds)
                self.started.append((self.now, task))
                number += 1
            if plan.phase == "done":
                break
            wake = ended_at + SECOND_S * 1.001
            if self.now < wake and (not queue or wake < queue[0][0]):
                self.now = wake  # what was sent in the last second left no room
                continue
            assert queue, "the plan is not done, and has nothing to do"
            self.now, _, host, outcomes = heapq.heappop(queue)
            for outcome in outcomes:
                plan.take(outcome)
                self.outcomes.append(outcome)
            plan.finish(host)
            ended_at = self.now
            if until(self):
                break
        return self

    def _probe(self, task: Task, began: float, seconds: float) -> None:
        if isinstance(task, Sound):
            for n, peer in enumerate(task.peers[: round(seconds * task.rate_per_s / PROBES)]):
                for router in self.path(task.source, peer, 0):
                    self.expired[router].append(began + n * PROBES / task.rate_per_s)
            return
        chance = random.Random(f"{task} {began}")
        pause_s = 1 / task.rules.ttl_rate_per_s
        spine_of: dict[int, int] = defaultdict(lambda: chance.randrange(self.spines))
        for n in range(math.floor(seconds / pause_s) + 1):
            for router in self.path(task.source, task.peer, spine_of[math.floor(n * pause_s)]):
                self.expired[router].append(began + n * pause_s)

    def most_in_a_second(self) -> int:
        """The most probes that a router got within any second."""
        most = 0
        for times in self.expired.values():
            times.sort()
            first = 0
            for n, at in enumerate(times):
                while times[first] <= at - 1.0:
                    first += 1
                most = max(most, n + 1 - first)
        return most

    def soundings(self) -> list[Sounded]:
        return [o for o in self.outcomes if isinstance(o, Sounded)]

    def searches(self) -> list[Searched]:
        return [o for o in self.outcomes if isinstance(o, Searched)]
