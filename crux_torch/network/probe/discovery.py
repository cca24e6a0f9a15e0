"""One search for paths: the next question to each port, and what the answers tell.

The clock and the packets come from outside, so tests play both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Literal, NamedTuple

from crux_torch.network.probe.packets import Answer, Hops, Packets, Probe
from crux_torch.network.probe.rules import Pacer, Rules, confidence_after, draws_needed, passes

#: Ports that a hop leaves unanswered, having answered nobody, before it counts as silent.
_SILENT_AFTER = 6
_ATTEMPTS_UNHEARD = 3
_LONGEST_BACKOFF_S = 2.0
#: Answers that confirm where a port went when it was probed again. If packets were sprayed over two
#: paths, all would agree with a probability of 1/1024.
_CONFIRMATIONS = 10
#: Ports under way at the same time, a socket each.
_MAX_UNDER_WAY = 32
#: Ports to start at a time when the paths are known and only more ports are wanted.
_AT_ONCE = 8

#: Answers to one port, at some TTLs.
Answers = tuple[str | None, ...]
Ended = Literal["confident", "found", "time", "ports"]


class Rechecked(NamedTuple):
    """The result of probing ports a second time.

    Attributes:
        repeated, changed: ports that answered, and those of them on another path than before.
        moved: True if the changed ports keep their new paths: the network has changed meanwhile,
            and does not spray packets.
    """

    repeated: int
    changed: int
    moved: bool


@dataclass(slots=True)
class _Port:
    """One source port: its answers at each TTL, and the probe that it waits for.

    Attributes:
        silent: TTLs at which an answer would have come, if its router gave any.
    """

    number: int
    answers: dict[int, str | None] = field(default_factory=dict)
    asked_at: dict[int, list[float]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    not_before: float = 0.0
    waiting_for: Probe | None = None
    deadline: float = 0.0


@dataclass(slots=True)
class _Layer:
    """The routers that answer at one TTL.

    Attributes:
        addresses: of those that answered, with how many ports.
        unheard: ports that were given up because nobody answered.
        implied: of a slow layer, the address that follows from the answers at the TTLs before. The
            layer is asked about a port only if they are not in here. None: asked about every port.
    """

    pacer: Pacer
    addresses: Counter[str] = field(default_factory=Counter)
    unheard: int = 0
    implied: dict[Answers, str] | None = None

    @property
    def silent(self) -> bool:
        return not self.addresses and self.unheard >= _SILENT_AFTER


class Discovery:
    """One search for the paths of source ports: each is asked about every TTL, one at a time.

    docs/understand/paths.md says when it stops, and when a slow TTL is not asked about every port.

    Args:
        clock: seconds, monotonic.
        ports: source ports in random order. They count in this order, not in that of the answers.
        watch: called with this object whenever something was learned.

    Attributes:
        sent, answered, ended: as in :class:`~crux_torch.network.probe.prober.PathMap`.
    """

    def __init__(
        self,
        packets: Packets,
        clock: Callable[[], float],
        ports: Iterable[int],
        ttls: Sequence[int],
        rules: Rules,
        watch: Callable[[Discovery], None] | None = None,
    ) -> None:
        self.sent = self.answered = 0
        self.ended: Ended = "ports"
        self._packets, self._clock, self._rules, self._watch = packets, clock, rules, watch
        self._supply: Iterator[int] = iter(ports)
        self._exhausted = False
        of_ttl_per_s = min(rules.rate_per_s, rules.ttl_rate_per_s)
        self._layers = {ttl: _Layer(Pacer(of_ttl_per_s)) for ttl in ttls}
        self._overall = Pacer(rules.rate_per_s)
        self._drawn: list[_Port] = []
        self._under_way: list[_Port] = []
        self._start_count()

    def run(self, until: float) -> None:
        """Search until the rules say stop, or the clock says ``until``."""
        self._draw()
        while not self._finished(until):
            self._step(until)
            self._draw()
        for port in self._under_way:
            if port.waiting_for is not None:
                self._packets.forget(port.waiting_for)
                port.waiting_for = None

    def recheck(self, until: float) -> Rechecked:
        """Probes some ports a second time, and those on another path again."""
        before = self.hops
        complete = {port: hops for port, hops in before.items() if self._is_complete(hops)}
        of_each_path = {hops: port for port, hops in reversed(complete.items())}
        ports = list(dict.fromkeys([*reversed(of_each_path.values()), *complete]))
        again = self._again(ports[: self._rules.repeats], until)
        changed = [n for n, hops in again.items() if _differ(before[n], hops)]
        moved = bool(changed)
        for _ in range(math.ceil(_CONFIRMATIONS / len(changed)) if changed else 0):
            confirmed = self._again(changed, until)
            moved &= confirmed.keys() == set(changed)
            moved &= not any(_differ(again[n], hops) for n, hops in confirmed.items())
            if not moved:
                break
        return Rechecked(len(again), len(changed), moved)

    def _again(self, ports: Sequence[int], until: float) -> dict[int, Hops]:
        """Probe ports once more; returns the answers of those that got any."""
        rules = replace(self._rules, ports_per_path=65535, via=(), via_ports=0)
        again = Discovery(self._packets, self._clock, ports, tuple(self._layers), rules)
        again._layers, again._overall = self._layers, self._overall
        again.run(until)
        self.sent += again.sent
        self.answered += again.answered
        return {p.number: tuple(p.answers.items()) for p in again._drawn if any(p.answers.values())}

    @property
    def hops(self) -> dict[int, Hops]:
        """The answers to each port that is done with, in the order in which they were drawn."""
        return {p.number: self._hops(p) for p in self._drawn if not self._is_under_way(p)}

    @property
    def quiet(self) -> tuple[int, ...]:
        """Ports whose path crosses a router that stays silent, though others at its TTL answer."""
        return tuple(p.number for p in self._drawn if p.silent and self._is_sure(p, self._hops(p)))

    @property
    def inferred(self) -> tuple[int, ...]:
        """TTLs that answer slowly and were not asked about every port."""
        return tuple(ttl for ttl, layer in self._layers.items() if layer.implied is not None)

    @property
    def path_count(self) -> int:
        return len(self._paths)

    @property
    def confidence(self) -> float:
        """Probability that no path of an equal share is missing."""
        return confidence_after(len(self._paths), self._run)

    def _finished(self, until: float) -> bool:
        rules = self._rules
        if rules.via_ports and self._via >= rules.via_ports:
            self.ended = "found"
        elif self._is_confident() and not self._under_way:
            self.ended = "confident"
        elif self._clock() >= until:
            self.ended = "time"
        elif self._exhausted and not self._under_way:
            self.ended = "ports"
        else:
            return False
        return True

    def _is_confident(self) -> bool:
        rules, paths = self._rules, self._paths
        if not paths or (rules.via_ports and self._via):
            return False
        enough = self._run >= draws_needed(len(paths), rules.confidence)
        return enough and min(paths.values()) >= rules.ports_per_path

    def _draw(self) -> None:
        """Start as many ports as the stopping rule still lacks, no more."""
        if self._is_confident():
            return
        needed = draws_needed(max(1, len(self._paths)), self._rules.confidence)
        lacking = needed - self._run
        target = min(lacking if lacking > 0 else _AT_ONCE, _MAX_UNDER_WAY)
        lacking = max(0, target - (len(self._drawn) - self._counted))
        started = [_Port(number) for number in islice(self._supply, lacking)]
        self._exhausted |= len(started) < lacking
        self._drawn += started
        self._under_way += started

    def _step(self, until: float) -> None:
        wake = min(self._send(), until)
        for answer in self._packets.receive(max(0.0, wake - self._clock())):
            self._take(answer)
        self._give_up_late()
        self._count()
        if self._watch is not None:
            self._watch(self)

    def _send(self) -> float:
        """Send the probes that are due. Returns the time of the next ones."""
        now, wake = self._clock(), inf
        for port in list(self._under_way):
            if port.waiting_for is not None:
                wake = min(wake, port.deadline)
                continue
            asks = self._to_ask(port)
            if not asks:
                return now
            ttl = min(asks, key=lambda t: self._layers[t].pacer.next_at)
            pacer = self._layers[ttl].pacer
            at = max(port.not_before, pacer.next_at, self._overall.next_at)
            if at > now:
                wake = min(wake, at)
            elif self._packets.send(probe := Probe(port.number, ttl)):
                self.sent += 1
                pacer.sent(now)
                self._overall.sent(now)
                port.asked_at.setdefault(ttl, []).append(now)
                port.waiting_for = probe
                port.deadline = now + self._rules.answer_wait_s
                wake = min(wake, port.deadline)
            else:
                # A connection of this host has it: no new one can, so it is not a draw either.
                self._under_way.remove(port)
                self._drawn.remove(port)
                wake = now
        return wake

    def _take(self, answer: Answer) -> None:
        port = next((p for p in self._under_way if p.waiting_for == answer.probe), None)
        if port is None:
            return
        ttl = answer.probe.ttl
        layer = self._layers[ttl]
        port.waiting_for = None
        self.answered += 1
        *lost, arrived = port.asked_at[ttl]
        for sent_at in lost:
            layer.pacer.result(sent_at, False, self._clock())
        layer.pacer.result(arrived, True, self._clock())
        if answer.kind == "refusal":
            port.answers[ttl] = None
            return
        if not layer.addresses:
            self._ask_again(ttl)
        port.answers[ttl] = answer.address
        layer.addresses[answer.address] += 1
        if layer.pacer.slowed or layer.implied is not None:
            self._infer(ttl)

    def _infer(self, ttl: int) -> None:
        """Find out whether the answers at ``ttl`` follow from those at the TTLs before."""
        layer, table, count = self._layers[ttl], dict[Answers, str](), 0
        before = layer.implied is not None
        layer.implied = None
        for port in self._drawn:
            given, address = self._before(port, ttl), port.answers.get(ttl)
            if address is None or None in given:
                continue
            if table.setdefault(given, address) != address:
                break
            count += 1
        else:
            # If each entry were one of two equal ones, each confirmation would have shown it with
            # probability 1/2.
            if count - len(table) >= draws_needed(1, self._rules.confidence):
                layer.implied = table
        if before != (layer.implied is not None):
            self._start_count()

    def _give_up_late(self) -> None:
        now, rules = self._clock(), self._rules
        for port in list(self._under_way):
            probe = port.waiting_for
            if probe is None or port.deadline > now:
                continue
            self._packets.forget(probe)
            port.waiting_for = None
            layer, attempts = self._layers[probe.ttl], len(port.asked_at[probe.ttl])
            # If nobody ever answered, perhaps nobody does: don't wait long to find out.
            enough = layer.pacer.attempts if layer.addresses else _ATTEMPTS_UNHEARD
            if attempts < min(enough, rules.retries + 1):
                backoff = rules.answer_wait_s * 2.0 ** (attempts - 1)
                port.not_before = now + min(backoff, _LONGEST_BACKOFF_S)
                continue
            port.answers[probe.ttl] = None
            if layer.addresses and attempts >= enough:
                port.silent.add(probe.ttl)
            layer.unheard += 1
            if layer.unheard == _SILENT_AFTER and layer.silent:
                self._start_count()

    def _ask_again(self, ttl: int) -> None:
        """Somebody does answer here: ask for the ports that were given up before that showed."""
        for port in self._drawn:
            if port.answers.get(ttl, "") is None:
                del port.answers[ttl], port.asked_at[ttl]
        self._start_count()

    def _start_count(self) -> None:
        """Count anew, because what is known of ports that were counted has changed."""
        self._counted = self._run = self._via = 0
        self._paths: Counter[Hops] = Counter()
        self._under_way = [port for port in self._drawn if self._is_under_way(port)]

    def _count(self) -> None:
        """Count the ports that are done with, up to the first that is not."""
        self._under_way = [port for port in self._under_way if self._is_under_way(port)]
        busy = {port.number for port in self._under_way}
        for port in self._drawn[self._counted :]:
            if port.number in busy:
                return
            hops = self._hops(port)
            self._counted += 1
            self._via += bool(self._rules.via) and passes(hops, self._rules.via)
            if self._is_complete(hops) or self._is_sure(port, hops):
                self._run = self._run + 1 if hops in self._paths else 0
                self._paths[hops] += 1

    def _to_ask(self, port: _Port) -> list[int]:
        layers = self._layers.items()
        missing = [t for t, layer in layers if not (t in port.answers or layer.silent)]
        unconditional = [ttl for ttl in missing if self._layers[ttl].implied is None]
        if unconditional:
            return unconditional
        given = {ttl: self._before(port, ttl) for ttl in missing}
        return [
            ttl
            for ttl in missing
            if None not in given[ttl] and given[ttl] not in (self._layers[ttl].implied or ())
        ]

    def _is_under_way(self, port: _Port) -> bool:
        return port.waiting_for is not None or bool(self._to_ask(port))

    def _is_complete(self, hops: Hops) -> bool:
        return all(address or self._layers[ttl].silent for ttl, address in hops)

    def _is_sure(self, port: _Port, hops: Hops) -> bool:
        """True if all that does not answer for ``port`` surely never does, and shall count."""
        silent = (ttl in port.silent or self._layers[ttl].silent for ttl, a in hops if not a)
        return self._rules.count_silent and all(silent)

    def _before(self, port: _Port, ttl: int) -> Answers:
        """The answers to a port at the TTLs before ``ttl``, silent ones left out."""
        hops = self._hops(port, ttl)
        return tuple(address for t, address in hops if not self._layers[t].silent)

    def _hops(self, port: _Port, end: int = 256) -> Hops:
        """The answers to a port at the TTLs before ``end``, inferred ones included."""
        hops: list[tuple[int, str | None]] = []
        given: Answers = ()
        for ttl, layer in self._layers.items():
            if ttl >= end:
                break
            address = port.answers.get(ttl) or (layer.implied or {}).get(given)
            hops.append((ttl, address))
            if not layer.silent:
                given += (address,)
        return tuple(hops)


def _differ(before: Hops, now: Hops) -> bool:
    """True if another address answered at a TTL."""
    answers = dict(before)
    return any(a and answers.get(ttl) not in (None, a) for ttl, a in now)
