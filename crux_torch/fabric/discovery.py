"""The rules of probing: which port to ask about which hop, when to ask again, when to stop.

Pure but for its clock and its packets, which come from outside: tests play both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

from crux_torch.fabric.error_queue import Answer, Probe
from crux_torch.fabric.path_map import Hops, WantedHop, confidence_after, draws_needed, passes
from crux_torch.fabric.probe_pacer import Pacer
from crux_torch.fabric.probe_rules import Rules

#: Ports of which a hop that never answered anyone is asked before it counts as silent.
_SILENT_AFTER = 6
_ATTEMPTS_UNHEARD = 3
_LONGEST_BACKOFF_S = 2.0
#: Ports under way at the same time, a socket each.
_MOST_UNDER_WAY = 32
#: Ports to start at a time where the paths are known and only more ports are wanted.
_AT_ONCE = 8

Answers = tuple["str | None", ...]
Ended = Literal["confident", "found", "time", "ports"]


class Packets(Protocol):
    """What sends probes and hears answers: :class:`~crux_torch.fabric.error_queue.ErrorQueue`."""

    def send(self, probe: Probe) -> bool:
        """Send; False where the source port is taken."""

    def receive(self, timeout_s: float) -> list[Answer]:
        """The answers that come within ``timeout_s``, the first ones at once."""

    def forget(self, probe: Probe) -> None:
        """Wait no longer for an answer to ``probe``."""


@dataclass(slots=True)
class _Port:
    """One source port: what it has learned of each TTL, and what it waits for."""

    number: int
    answers: dict[int, str | None] = field(default_factory=dict)
    asked_at: dict[int, list[float]] = field(default_factory=dict)
    not_before: float = 0.0
    waiting_for: Probe | None = None
    deadline: float = 0.0

    def at(self, ttls: Sequence[int]) -> Answers:
        return tuple(self.answers.get(ttl) for ttl in ttls)


class Discovery:
    """One search for the paths of source ports.

    Each port is asked about every TTL, one at a time. The ports are a random sequence, and the
    search stops when the last n of them showed no new path, in this sequence and not in the order
    of their answers, because ports over a slow router come in late: see
    :func:`~crux_torch.fabric.path_map.draws_needed`.

    Args:
        packets: how to send.
        clock: seconds, monotonic.
        ports: source ports in random order.
        ttls: to ask about.
        rules: how.
        watch: called with this object whenever something was learned.

    Attributes:
        sent: probes.
        answered: probes that were answered.
        ended: why :meth:`run` stopped, as in :class:`~crux_torch.fabric.path_map.PathMap`.
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
        self._packets, self._clock, self._rules = packets, clock, rules
        self._watch = watch
        self._supply: Iterator[int] = iter(ports)
        self._ttls = tuple(ttls)
        self._pacers = {ttl: Pacer(rules.rate_per_s) for ttl in ttls}
        self._overall = Pacer(rules.rate_per_s)
        self._speakers: dict[int, Counter[str]] = {ttl: Counter() for ttl in ttls}
        self._unheard = dict.fromkeys(ttls, 0)
        self._silent: set[int] = set()
        #: TTLs that are asked of every port; the answers of the others follow from theirs.
        self._telling = self._ttls
        self._implied: dict[int, dict[Answers, str]] = {}
        self._drawn: list[_Port] = []
        self._under_way: list[_Port] = []
        self._exhausted = False
        self._learning = True
        self._enough_of_one = draws_needed(1, rules.confidence)
        self._tally = _Tally(self._is_complete, rules.via)

    def run(self, until: float) -> None:
        """Search until the rules say stop, or the clock says ``until``."""
        while not self._finished(until):
            self._draw()
            self._step(until)
        self._forget_all()

    def recheck(self, until: float) -> tuple[int, int]:
        """Probe some ports a second time; say how many were, and how many changed their path."""
        first: dict[Hops, _Port] = {}
        known = self.hops
        done = [p for p in self._drawn if p.number in known and self._is_complete(self._hops(p))]
        for port in done:
            first.setdefault(self._hops(port), port)
        chosen = {port.number: port for port in (*first.values(), *done)}
        before = list(chosen.values())[: self._rules.repeats]
        again = [_Port(port.number) for port in before]
        sequence, tally = self._drawn, self._tally
        self._drawn, self._under_way = again, list(again)
        self._learning = False
        self._tally = _Tally(self._is_complete, ())
        while self._under_way and self._clock() < until:
            self._step(until)
        self._forget_all()
        self._drawn, self._tally, self._under_way = sequence, tally, []
        repeated = changed = 0
        for old, new in zip(before, again, strict=True):
            pairs = [(old.answers.get(ttl), new.answers.get(ttl)) for ttl in self._ttls]
            heard = [(a, b) for a, b in pairs if a and b]
            repeated += bool(heard)
            changed += any(a != b for a, b in heard)
        return repeated, changed

    @property
    def hops(self) -> dict[int, Hops]:
        """What is known of each port that is done with, in the order in which they were drawn."""
        return {p.number: self._hops(p) for p in self._drawn if not self._is_under_way(p)}

    @property
    def settled(self) -> tuple[int, ...]:
        """TTLs that answer slowly and were not asked of every port any more.

        What they would answer follows from the other TTLs' answers: as often as a second
        possibility would have shown with the confidence of the rules, it did.
        """
        return tuple(sorted(self._implied))

    @property
    def path_count(self) -> int:
        """Paths that are known so far."""
        return len(self._tally.ports)

    @property
    def confidence(self) -> float:
        """That no path of an equal share is missing, among ports whose every hop answered."""
        return confidence_after(len(self._tally.ports), self._tally.run)

    def _finished(self, until: float) -> bool:
        rules = self._rules
        if rules.via_ports and self._tally.via >= rules.via_ports:
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
        tally, rules = self._tally, self._rules
        if not tally.ports or tally.run < draws_needed(len(tally.ports), rules.confidence):
            return False
        if rules.via_ports and tally.via:
            return False
        return min(tally.ports.values()) >= rules.ports_per_path

    def _draw(self) -> None:
        """Start as many ports as the stopping rule still lacks, no more."""
        if self._is_confident():
            return
        needed = draws_needed(max(1, len(self._tally.ports)), self._rules.confidence)
        lacking = needed - self._tally.run
        wanted = min(lacking if lacking > 0 else _AT_ONCE, _MOST_UNDER_WAY)
        for _ in range(wanted - (len(self._drawn) - self._tally.counted)):
            number = next(self._supply, None)
            if number is None:
                self._exhausted = True
                return
            port = _Port(number)
            self._drawn.append(port)
            self._under_way.append(port)

    def _step(self, until: float) -> None:
        wake = min(self._send(), until)
        for answer in self._packets.receive(max(0.0, wake - self._clock())):
            self._take(answer)
        self._give_up_late()
        self._retire()
        if self._watch is not None:
            self._watch(self)

    def _send(self) -> float:
        """Send what may be sent now; return when to look again."""
        now, wake = self._clock(), inf
        for port in list(self._under_way):
            if port.waiting_for is not None:
                wake = min(wake, port.deadline)
                continue
            asks = self._to_ask(port)
            if not asks:
                return now
            ttl = min(asks, key=lambda t: self._pacers[t].next_at)
            at = max(port.not_before, self._pacers[ttl].next_at, self._overall.next_at)
            if at > now:
                wake = min(wake, at)
            elif self._packets.send(probe := Probe(port.number, ttl)):
                self.sent += 1
                self._pacers[ttl].sent(now)
                self._overall.sent(now)
                port.asked_at.setdefault(ttl, []).append(now)
                port.waiting_for = probe
                port.deadline = now + self._rules.answer_wait_s
                wake = min(wake, port.deadline)
            else:
                # Taken by a connection of this host: of no use to a new one, so not a draw either.
                self._under_way.remove(port)
                if port in self._drawn:
                    self._drawn.remove(port)
                wake = now
        return wake

    def _take(self, answer: Answer) -> None:
        port = next((p for p in self._under_way if p.waiting_for == answer.probe), None)
        if port is None:
            return
        ttl = answer.probe.ttl
        port.waiting_for = None
        self.answered += 1
        for sent_at in port.asked_at[ttl]:
            answered = sent_at == port.asked_at[ttl][-1]
            self._pacers[ttl].result(sent_at, answered, self._clock())
        if answer.kind == "refusal":
            port.answers[ttl] = None
            return
        port.answers[ttl] = answer.address
        if not self._speakers[ttl]:
            self._ask_again(ttl)
        self._speakers[ttl][answer.address] += 1
        self._reconsider(ttl)

    def _give_up_late(self) -> None:
        now, rules = self._clock(), self._rules
        for port in self._under_way:
            probe = port.waiting_for
            if probe is None or port.deadline > now:
                continue
            self._packets.forget(probe)
            port.waiting_for = None
            ttl, attempts = probe.ttl, len(port.asked_at[probe.ttl])
            # Where nobody ever answered, perhaps nobody does: don't wait long to find out.
            enough = self._pacers[ttl].attempts if self._speakers[ttl] else _ATTEMPTS_UNHEARD
            if attempts >= min(enough, rules.retries + 1):
                port.answers[ttl] = None
                self._unheard[ttl] += 1
            else:
                backoff = rules.answer_wait_s * 2.0 ** (attempts - 1)
                port.not_before = now + min(backoff, _LONGEST_BACKOFF_S)
            self._reconsider(ttl)

    def _ask_again(self, ttl: int) -> None:
        """Somebody does answer here: ask for the ports that were given up before that showed."""
        for port in self._drawn:
            if ttl in port.answers and port.answers[ttl] is None:
                del port.answers[ttl], port.asked_at[ttl]
        self._start_over()

    def _start_over(self) -> None:
        """Count anew, after what is known of ports that were counted has changed."""
        self._tally = _Tally(self._is_complete, self._rules.via if self._learning else ())
        self._under_way = [port for port in self._drawn if self._is_under_way(port)]

    def _reconsider(self, ttl: int) -> None:
        """Whether TTLs are silent, or settled, after what was heard last of ``ttl``."""
        if not self._learning:
            return
        before = (set(self._silent), set(self._implied))
        if self._speakers[ttl]:
            self._silent.discard(ttl)
        elif self._unheard[ttl] >= _SILENT_AFTER:
            self._silent.add(ttl)
        if self._pacers[ttl].slowed or self._implied:
            self._settle()
        if before != (self._silent, set(self._implied)):
            self._start_over()

    def _settle(self) -> None:
        """Find the slow TTLs whose answers follow from those of the others, the slowest first."""
        telling = [ttl for ttl in self._ttls if ttl not in self._silent]
        slow = [t for t in telling if self._pacers[t].slowed or t in self._implied]
        settled = []
        for ttl in sorted(slow, key=lambda t: self._pacers[t].rate_per_s):
            others = [t for t in telling if t != ttl]
            table, surplus = self._table(ttl, others)
            if table and surplus >= self._enough_of_one:
                telling = others
                settled.append(ttl)
        tables = {ttl: self._table(ttl, telling)[0] for ttl in settled}
        # What follows from the others may not follow from the telling ones alone: then ask all.
        agree = all(tables.values())
        self._telling = tuple(telling) if agree else self._ttls
        self._implied = tables if agree else {}

    def _table(self, ttl: int, others: Sequence[int]) -> tuple[dict[Answers, str], int]:
        """What the answers of other TTLs imply for ``ttl``; empty where they don't decide it.

        With how many ports confirmed an entry. Were each entry in truth one of two equal ones,
        each confirmation would have shown it with probability 1/2.
        """
        table: dict[Answers, str] = {}
        count = 0
        for port in self._drawn:
            given, address = port.at(others), port.answers.get(ttl)
            if address is None or None in given:
                continue
            if table.setdefault(given, address) != address:
                return {}, 0
            count += 1
        return table, count - len(table)

    def _retire(self) -> None:
        """Count the ports that are done with, up to the first that is not."""
        self._under_way = [port for port in self._under_way if self._is_under_way(port)]
        busy = {port.number for port in self._under_way}
        while self._tally.counted < len(self._drawn):
            port = self._drawn[self._tally.counted]
            if port.number in busy:
                break
            self._tally.count(self._hops(port))

    def _forget_all(self) -> None:
        for port in self._under_way:
            if port.waiting_for is not None:
                self._packets.forget(port.waiting_for)
                port.waiting_for = None

    def _to_ask(self, port: _Port) -> list[int]:
        missing = [ttl for ttl in self._telling if ttl not in port.answers]
        if missing or not self._implied:
            return [ttl for ttl in missing if ttl not in self._silent]
        given = port.at(self._telling)
        if None in given:
            return []
        return [
            t for t, table in self._implied.items() if not (t in port.answers or given in table)
        ]

    def _is_under_way(self, port: _Port) -> bool:
        return port.waiting_for is not None or bool(self._to_ask(port))

    def _is_complete(self, hops: Hops) -> bool:
        return all(address or ttl in self._silent for ttl, address in hops)

    def _hops(self, port: _Port) -> Hops:
        given = port.at(self._telling)
        return tuple(
            (ttl, port.answers.get(ttl) or self._implied.get(ttl, {}).get(given))
            for ttl in self._ttls
        )


class _Tally:
    """The paths of the first ports of the sequence."""

    def __init__(self, is_complete: Callable[[Hops], bool], via: Sequence[WantedHop]) -> None:
        self.counted = self.run = self.via = 0
        self.ports: Counter[Hops] = Counter()
        self._is_complete, self._via = is_complete, via

    def count(self, hops: Hops) -> None:
        self.counted += 1
        if self._via and passes(hops, self._via):
            self.via += 1
        if self._is_complete(hops):
            self.run = self.run + 1 if hops in self.ports else 0
            self.ports[hops] += 1
