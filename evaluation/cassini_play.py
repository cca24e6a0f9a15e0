"""Jobs of CASSINI's evaluation under a scheduler that gives, takes and moves workers.

The network, the placements and CASSINI are those of ``crux sim trace``. A job whose workers change
starts again from its last whole iteration. Times of iterations do not count what is cut off.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.model import Cluster, Memory, SchedulerOptions
from crux_torch.schedule.papers.cassini import Candidate, cassini, compatibility
from crux_torch.schedule.papers.intensity import link_traffic
from crux_torch.sim.networks import PrivateNetworks, SharedNetwork, grain_of
from crux_torch.sim.placement import (
    CANDIDATES,
    Allocation,
    PlacedJob,
    Placer,
    Request,
    candidates,
    place_random,
)
from evaluation.cassini_jobs import StudyJob
from evaluation.cassini_shares import Bid, pollux, themis
from evaluation.saturated import meeting

#: Themis's lease and epoch (§5.1); seconds between Pollux's looks, as its paper has them.
LEASE_S, LOOK_S = 600.0, 60.0
#: Iterations that a job without an end is given.
ENDLESS = 10**7
GPUs = tuple[str, ...]


class Scheme(NamedTuple):
    """One of the paper's schedulers: who shares workers out, where they stand, and shifts."""

    shares: str = "themis"
    near: bool = True
    cassini: bool = False
    alone: bool = False


SCHEMES = {
    "themis": Scheme(),
    "th+cassini": Scheme(cassini=True),
    "pollux": Scheme("pollux"),
    "po+cassini": Scheme("pollux", cassini=True),
    "random": Scheme(near=False),
    "ideal": Scheme(alone=True),
}


class Seen(NamedTuple):
    """``count`` iterations of ``time_s`` each on average; alone they take ``alone_s``."""

    kind: str
    count: int
    workers: int
    time_s: float
    alone_s: float


@dataclass(slots=True)
class Outcome:
    """Measures of one run.

    Attributes:
        seen: iterations, in pieces of one tick.
        done: iterations times workers of each job.
        marked: bytes of each kind of model on links that were asked for more than they carry.
        met, shifted: shares of the workers' time, of jobs that share links, and that are shifted.
        sending: share of the workers' time that the data they sent takes on their links alone.
        scores: compatibility of the placements that CASSINI chose; 1: nobody has to take turns;
            -inf: each candidate had a loop, and it took the scheduler's own.
        moves: times that a job stopped to start again on other GPUs, or to wait.
    """

    seen: list[Seen] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    marked: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    met: float = 0.0
    shifted: float = 0.0
    sending: float = 0.0
    scores: list[float] = field(default_factory=list)
    moves: int = 0

    @property
    def score(self) -> float | None:
        """Mean of the finite ``scores``; None where CASSINI chose no placement."""
        finite = [score for score in self.scores if score > -inf]
        return statistics.mean(finite) if finite else None

    def marked_per_iteration(self) -> dict[str, float]:
        """Marked bytes by iteration, for each kind of model."""
        counts: dict[str, int] = defaultdict(int)
        for seen in self.seen:
            counts[seen.kind] += seen.count
        return {kind: self.marked[kind] / count for kind, count in counts.items()}

    def quantities(self) -> dict[str, float]:
        """Mean and 99th percentile of the iteration times, and of those over the times alone.

        An iteration counts as much as it takes alone, once for each worker. So a job counts as its
        work, however many workers it gets, and all schedulers' means are over the same work.
        """
        found = {}
        count = np.array([s.count * s.workers * s.alone_s for s in self.seen])
        for name, values in (
            ("s", np.array([s.time_s for s in self.seen])),
            ("slowdown", np.array([s.time_s / s.alone_s for s in self.seen])),
        ):
            found[f"mean_{name}"] = float(np.average(values, weights=count))
            order = np.argsort(values)
            rank = np.searchsorted(np.cumsum(count[order]), 0.99 * count.sum())
            found[f"p99_{name}"] = float(values[order][rank])
        return found


@dataclass(slots=True)
class _Active:
    job: StudyJob
    left: float
    gpus: GPUs = ()
    leases: list[tuple[float, int]] = field(default_factory=list)
    starts: int = 0
    since_s: float = 0.0
    placed: PlacedJob | None = None
    ended: int = 0
    ended_s: float = 0.0
    sent_s: float = 0.0


class Run:
    """Plays the jobs of one trace under one scheme.

    Args:
        jobs: in the order of their arrival.
        seed: of placements and of what Themis draws.
        tick_s: seconds between two measures; iterations within one are counted at their mean.
        until_s: end of the run; inf: that of the last job.
        watch_s: from when on iterations, and the bytes on contended links, are counted.
    """

    def __init__(
        self,
        jobs: Sequence[StudyJob],
        placer: Placer,
        scheme: Scheme,
        seed: int = 0,
        *,
        tick_s: float = 0.1,
        until_s: float = inf,
        watch_s: float | None = None,
    ) -> None:
        self._arrivals = list(reversed(jobs))
        self._placer = placer
        self._scheme = scheme
        self._rng = random.Random(f"cassini {seed}")
        self._tick_s, self._until_s, self._watch_s = tick_s, until_s, watch_s
        self._gpus = len(placer.cells.gpus)
        self._active: dict[str, _Active] = {}
        self._memory = Memory()
        self._network: SharedNetwork | PrivateNetworks = (
            PrivateNetworks() if scheme.alone else SharedNetwork(placer.topology)
        )
        self._look_s = inf if scheme.shares == "themis" else LOOK_S
        self._asked: dict[str, dict[str, float]] = {}
        self._met = self._shifted = 0.0
        self._held_gpu_s = 0.0
        self.outcome = Outcome()

    def play(self) -> Outcome:
        """Plays to the end."""
        network, out = self._network, self.outcome
        while (self._arrivals or self._active) and network.now_s < self._until_s:
            began_s = network.now_s
            due_s = self._due_s()
            ended = network.run_until_end_of_any(min(due_s, began_s + self._tick_s))
            self._measure(network.now_s - began_s)
            for name in ended:
                self._leave(name.split("#")[0])
            while self._arrivals and self._arrivals[-1].submit_s <= network.now_s:
                job = self._arrivals.pop()
                self._active[job.name] = _Active(job, job.iterations * job.workers)
            if ended or network.now_s >= due_s:
                self._share()
        held_gpu_s = self._held_gpu_s or 1.0
        out.met, out.shifted = out.met / held_gpu_s, out.shifted / held_gpu_s
        out.sending /= held_gpu_s
        return out

    def _due_s(self) -> float:
        leases = [expiry for each in self._active.values() for expiry, _ in each.leases]
        arrival = self._arrivals[-1].submit_s if self._arrivals else inf
        return min([arrival, self._look_s, self._until_s, *leases])

    def _measure(self, passed_s: float) -> None:
        held = 0
        sending: list[tuple[_Active, float]] = []
        counts = self._watch_s is None or self._network.now_s > self._watch_s
        for each in self._active.values():
            if each.placed is None:
                continue
            held += len(each.gpus)
            ended, ended_s, sent_s = self._progress(each)
            if ended > each.ended and counts:
                count = ended - each.ended
                mean_s = (ended_s - each.ended_s) / count
                alone_s = each.placed.alone_s
                seen = Seen(each.job.kind, count, len(each.gpus), mean_s, alone_s)
                self.outcome.seen.append(seen)
            if ended > each.ended:
                each.ended, each.ended_s = ended, ended_s
            if counts and self._watch_s is not None and sent_s > each.sent_s:
                sending.append((each, sent_s - each.sent_s))
            self.outcome.sending += (sent_s - each.sent_s) * len(each.gpus)
            each.sent_s = sent_s
        self._mark(sending)
        self._held_gpu_s += held * passed_s
        self.outcome.met += self._met * held * passed_s
        self.outcome.shifted += self._shifted * held * passed_s

    def _progress(self, each: _Active) -> tuple[int, float, float]:
        """Iterations that ended, when the last one did, and seconds' worth of data sent."""
        assert each.placed is not None
        name = each.placed.job.name
        if isinstance(self._network, PrivateNetworks):
            ended = int(self._network.progress(name).completed)
            return ended, each.since_s + ended * each.placed.alone_s, 0.0
        found = self._network.result(name)
        ended = found["completed"]
        return ended, found["start_s"] + ended * (found["mean_iteration_s"] or 0.0), found["comm_s"]

    def _mark(self, sending: Sequence[tuple[_Active, float]]) -> None:
        """Counts the bytes that were sent on links that were asked for more than they carry."""
        asked: dict[str, float] = defaultdict(float)
        for each, _ in sending:
            for link, share in self._asked[each.job.name].items():
                asked[link] += share
        for each, sent_s in sending:
            full = [
                share * self._placer.topology.capacity_Bps[link]
                for link, share in self._asked[each.job.name].items()
                if asked[link] > 1 + 1e-9
            ]
            if full:
                self.outcome.marked[each.job.kind] += sent_s * max(full)

    def _leave(self, name: str) -> None:
        each = self._active.pop(name)
        assert each.placed is not None
        self.outcome.done[name] += each.ended * len(each.gpus)
        self._network.forget(each.placed.job.name)

    def _share(self) -> None:
        by_themis = self._scheme.shares == "themis"
        workers, won = self._by_themis() if by_themis else self._by_pollux()
        gained = [n for n, count in workers.items() if count > len(self._active[n].gpus)]
        # Leases that were won anew, so that a job may as well stand elsewhere.
        renewed = [n for n in workers if won[n] and n not in gained]
        gpus = self._places(workers, gained, renewed)
        for name, each in self._active.items():
            if gpus[name] != each.gpus:
                self._move(each, gpus[name])
        self._replan()

    def _bids(self, held: Mapping[str, int]) -> list[Bid]:
        now_s = self._network.now_s
        bids = []
        for name, each in self._active.items():
            job = each.job

            def rate(workers: int, model: str = job.model) -> float:
                return workers / self._placer.reference(model, workers).alone_s

            left = each.left - each.ended * len(each.gpus)
            total = job.iterations * job.workers
            waited_s = now_s - job.submit_s
            bids.append(Bid(name, held[name], job.workers, waited_s, left, total, rate, job.unit))
        return bids

    def _by_themis(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the workers of each job, and those of them that it has just won."""
        now_s = self._network.now_s
        for each in self._active.values():
            each.leases = [(expiry, n) for expiry, n in each.leases if expiry > now_s]
        held = {n: sum(k for _, k in each.leases) for n, each in self._active.items()}
        won = themis(self._bids(held), self._gpus, self._rng)
        for name, count in won.items():
            if count:
                self._active[name].leases.append((now_s + LEASE_S, count))
        return {name: held[name] + won[name] for name in held}, won

    def _by_pollux(self) -> tuple[dict[str, int], dict[str, int]]:
        self._look_s = (self._network.now_s // LOOK_S + 1) * LOOK_S
        held = {name: len(each.gpus) for name, each in self._active.items()}
        found = pollux(self._bids(held), self._gpus)
        return found, {name: max(0, count - held[name]) for name, count in found.items()}

    def _places(
        self, workers: Mapping[str, int], gained: Sequence[str], renewed: Sequence[str]
    ) -> dict[str, GPUs]:
        """GPUs of each job: the scheduler's own choice, or the most compatible candidate."""
        stay = {n: self._active[n].gpus[:k] for n, k in workers.items() if n not in gained}
        own = self._placement(stay, [(n, workers[n]) for n in gained], near_first=True)
        if not self._scheme.cassini:
            return own
        found = {tuple(own.values()): own}
        stay = {name: gpus for name, gpus in stay.items() if name not in renewed}
        moving = [(n, workers[n]) for n in (*gained, *renewed)]
        for _ in range(CANDIDATES - 1 if moving else 0):
            self._rng.shuffle(moving)
            drawn = self._placement(stay, moving, near_first=False)
            found.setdefault(tuple(drawn.values()), drawn)
        return self._most_compatible(list(found.values()), [name for name, _ in moving])

    def _placement(
        self,
        stay: Mapping[str, GPUs],
        moving: Sequence[tuple[str, int]],
        *,
        near_first: bool,
    ) -> dict[str, GPUs]:
        """All jobs' GPUs; who moves takes the first or any of its own candidates, in turn."""
        allocation = Allocation(self._placer.cells)
        for name, gpus in stay.items():
            if gpus:
                allocation.take(Request(name, len(gpus)), gpus)
        found = dict(stay)
        for name, count in moving:
            request = Request(name, count)
            if not self._scheme.near:
                gpus = place_random(request, allocation, self._rng)
                assert gpus is not None
            else:
                choices = candidates(request, allocation, self._rng)
                gpus = choices[0] if near_first else self._rng.choice(choices)
            allocation.take(request, gpus)
            found[name] = gpus
        return {name: found[name] for name in self._active}

    def _most_compatible(
        self, places: Sequence[dict[str, GPUs]], moving: Sequence[str]
    ) -> dict[str, GPUs]:
        best, most = places[0], -inf
        for gpus in places:
            everyone = [
                placed
                for name in gpus
                if gpus[name] and (placed := self._placed(name, gpus[name])).job.flows
            ]
            if len(everyone) < 2:
                self.outcome.scores.append(1.0)
                return places[0]
            cluster = Cluster(self._placer.topology.capacity_Bps, tuple(p.job for p in everyone))
            candidate = Candidate(cluster, {p.job.name: p.default_path for p in everyone})
            found = [
                compatibility(candidate, p.job.name, self._memory)
                for p in everyone
                if p.job.name.split("#")[0] in moving
            ] or [compatibility(candidate, everyone[0].job.name, self._memory)]
            if not any(one.loop for one in found) and found[0].score > most + 1e-9:
                best, most = gpus, found[0].score
        self.outcome.scores.append(most)
        return best

    def _placed(self, name: str, gpus: GPUs) -> PlacedJob:
        """The job on these GPUs, under the name that it would run by."""
        each = self._active[name]
        if each.placed is not None and gpus == each.gpus:
            return each.placed
        return self._placer.place(f"{name}#{each.starts + 1}", each.job.model, gpus)

    def _move(self, each: _Active, gpus: GPUs) -> None:
        placed = self._placed(each.job.name, gpus) if gpus else None
        if each.placed is not None:
            each.left -= each.ended * len(each.gpus)
            self.outcome.done[each.job.name] += each.ended * len(each.gpus)
            self._network.forget(each.placed.job.name)
            self.outcome.moves += 1
        each.gpus, each.placed, each.ended, each.sent_s = gpus, placed, 0, 0.0
        self._asked.pop(each.job.name, None)
        if placed is None:
            return
        each.starts += 1
        each.since_s = each.ended_s = self._network.now_s
        left = ENDLESS if each.left == inf else ceil(each.left / len(gpus) - 1e-9)
        self._network.add(placed, grain_of(max(1, left), 1), 0)
        moved = link_traffic(placed.job, placed.default_path)
        capacity_Bps = self._placer.topology.capacity_Bps
        alone_s = max((size / capacity_Bps[link] for link, size in moved.items()), default=0.0)
        self._asked[each.job.name] = {
            link: size / (capacity_Bps[link] * alone_s) for link, size in moved.items() if size
        }

    def _replan(self) -> None:
        placed = [each.placed for each in self._active.values() if each.placed is not None]
        sends = [each for each in placed if each.job.flows]
        self._met, self._shifted = 0.0, 0.0
        if sends and not self._scheme.alone:
            held = sum(each.job.gpus for each in placed)
            self._met = meeting(sends)[1] * sum(each.job.gpus for each in sends) / held
        if not (sends and self._scheme.cassini):
            return
        cluster = Cluster(self._placer.topology.capacity_Bps, tuple(p.job for p in sends))
        paths = {p.job.name: p.default_path for p in sends}
        decision = cassini(cluster, SchedulerOptions(default_path=paths, memory=self._memory))
        self._shifted = sum(p.job.gpus for p in sends if p.job.name in decision.grid_s) / held
        self._network.apply(decision)
