"""The near end of ``crux qos check``: sends probes of each level, and load in one of them.

All packets have the same addresses, ports and protocol, so that the network's hash sends probes and
load over the same path, whatever their class.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec

from crux_torch.network.probe.live_trace import resolve, sound
from crux_torch.network.probe.packets import ProbeError, family_of
from crux_torch.network.probe.qos_listener import (
    HELLO,
    LOAD,
    MAGIC,
    PATIENCE_S,
    PORT,
    PROBE,
    PROBE_FORMAT,
    READY,
    TRACE,
    Arrival,
    arrivals_from,
    receive_exactly,
)
from crux_torch.network.probe.qos_marks import changed_between, lost_between, read_quotes
from crux_torch.network.probe.qos_verdicts import LevelVerdict, Sample, judge
from crux_torch.settings import SixBits

Rate = Annotated[float, msgspec.Meta(ge=0.0)]

#: A turn: probes without load, load alone until a queue stands, probes with load, silence until the
#: queue is empty. Short, so that neither clocks nor other traffic change much within it.
PROBE_S, LEAD_S, DRAIN_S = 0.8, 0.2, 0.3
#: Share of the load's packets that the far host may drop because it is too slow for them.
CHOKED = 0.01
#: Time that one call's load takes at its rate, and the lag after which it does not catch up.
_BATCH_S, _BEHIND_S = 0.001, 0.005
#: UDP's largest datagram, which a call hands to the kernel to be cut.
_MOST_BYTES = 65_000
_PROBE_BYTES = 64
_RETRY_S, _BUSY_S = 0.2, 120.0
_MAX_TTL, _TRACE_S, _ANSWER_WAIT_S = 16, 8.0, 0.2

_UDP_SEGMENT = 103
_CLASS_OPTION = {socket.AF_INET: (socket.IPPROTO_IP, 1), socket.AF_INET6: (socket.IPPROTO_IPV6, 67)}
#: By family: the option that tells a connected socket's MTU, and the bytes of the two headers.
_MTU_OPTION = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
_LARGEST_SEGMENT = 8900
_NEEDS_RAW = "it needs CAP_NET_RAW to read what routers quote (run it as root)"


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of a check.

    Attributes:
        seconds: of sending; at least one turn is made.
        rate: probes a second, of all levels together.
        load_bps: bits a second of load, headers included; 0: none.
    """

    seconds: float = 10.0
    rate: float = 200.0
    load_bps: float = 0.0

    @property
    def turns(self) -> int:
        """Number of turns that fit, at least one."""
        turn_s = PROBE_S + DRAIN_S + (LEAD_S + PROBE_S if self.load_bps else 0.0)
        return max(1, int(self.seconds / turn_s))


class QosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The treatment of each level on the way from one host to another.

    Attributes:
        at: time of the check, seconds since 1970.
        reference: the level that was loaded.
        load_bps, sent_bps: load asked for, and sent; bits a second.
        notes: on what could not be found out.
    """

    version: int = 1
    source: str
    destination: str
    at: float
    reference: SixBits
    load_bps: Rate = 0.0
    sent_bps: Rate = 0.0
    levels: tuple[LevelVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if no level's mark changes on the way, and each is served as it should."""
        return all(one.is_right(self.reference) for one in self.levels)

    @property
    def summary(self) -> str:
        """The verdicts in one line; levels that fare alike are named together."""
        alike: dict[str, list[str]] = {}
        for one in self.levels:
            if one.queue != "loaded" or one.mark != "kept":
                alike.setdefault(one.text(self.reference), []).append(str(one.level))
        return "; ".join(
            f"level{'s' if len(levels) > 1 else ''} {', '.join(levels)}: {text}"
            for text, levels in alike.items()
        )


def check(
    destination: str,
    dscp_of: Mapping[int, int],
    reference: int,
    effort: Effort,
    *,
    port: int = PORT,
    wait_s: float = 0.0,
    seed: int | None = None,
) -> QosReport:
    """Finds the treatment of each level on the way to ``destination``, where a listener runs.

    Args:
        dscp_of: DSCP value of each level.
        reference: level to load, and to compare the others with.
        wait_s: time for the listener to start, and to be done with other hosts.
        seed: of the order of probes within a tick.

    Raises:
        ProbeError: unknown name, no listener, or it went away.
    """
    to = resolve(destination)
    try:
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(_connected(to, port, wait_s))
            here = control.getsockname()[0]
            ends = _Ends(here, to, port)
            senders = {n: stack.enter_context(ends.sender(dscp_of[n])) for n in sorted(dscp_of)}
            load = None
            if effort.load_bps:
                sock = stack.enter_context(ends.sender(dscp_of[reference]))
                load = _Load(sock, effort.load_bps)
            run = _Run(control, senders, load, effort, random.Random(seed))
            run.greet(ends.source_port, max(wait_s, _BUSY_S))
            verdicts = judge(run.samples(), dscp_of, reference, choked=run.is_choked)
            verdicts, notes = _with_places(verdicts, senders, here, to)
    except ProbeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProbeError(
            error.errno or errno.EIO,
            f"no check with {destination} port {port}: {reason}; run `crux qos listen` "
            "there, and let TCP and UDP to that port pass its firewall",
        ) from None
    return QosReport(
        source=here,
        destination=to,
        at=time.time(),
        reference=reference,
        load_bps=effort.load_bps,
        sent_bps=load.sent_bps if load is not None else 0.0,
        levels=verdicts,
        notes=notes,
    )


def _connected(to: str, port: int, wait_s: float) -> socket.socket:
    until = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_connection((to, port), PATIENCE_S)
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(_RETRY_S)


@dataclass
class _Ends:
    """The two ends that all datagrams have."""

    here: str
    to: str
    port: int
    source_port: int = 0

    def sender(self, dscp: int) -> socket.socket:
        """A socket between them whose packets have this DSCP value."""
        family = family_of(self.to)
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            # Several sockets have the same ends.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.setsockopt(*_CLASS_OPTION[family], dscp << 2)
            sock.bind((self.here, self.source_port))
            sock.connect((self.to, self.port))
        except BaseException:
            sock.close()
            raise
        self.source_port = sock.getsockname()[1]
        return sock


class _Load:
    """Datagrams as fast as a rate allows, never faster."""

    def __init__(self, sock: socket.socket, rate_bps: float) -> None:
        self.sent_bps = 0.0
        self._sock, self._rate_Bps = sock, rate_bps / 8
        headers = _HEADERS[sock.family]
        segment = min(sock.getsockopt(*_MTU_OPTION[sock.family]) - headers, _LARGEST_SEGMENT)
        count = int(self._rate_Bps * _BATCH_S / (segment + headers))
        count = max(1, min(count, _MOST_BYTES // segment))
        try:
            sock.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, segment)
        except OSError:
            count = 1  # a kernel before 4.18 sends them singly
        self._batch = LOAD.ljust(segment, b"\0") * count
        self._packet_bytes = segment + headers
        self._batch_bytes = count * self._packet_bytes
        self._free_at = 0.0
        self._bytes, self._busy_s = 0, 0.0

    @property
    def packets(self) -> int:
        """Packets that were sent."""
        return self._bytes // self._packet_bytes

    def begin(self) -> float:
        """Start to count the time; returns the time of the first batch."""
        self._free_at = time.monotonic() + self._batch_bytes / self._rate_Bps
        return self._free_at

    def send(self) -> float:
        """Send a batch if it is time; returns the time of the next one."""
        now = time.monotonic()
        if now < self._free_at:
            return self._free_at
        try:
            self._sock.send(self._batch)
            self._bytes += self._batch_bytes
        except OSError:
            pass  # this host's queue is full, which is what load is for
        self._free_at = max(self._free_at, now - _BEHIND_S) + self._batch_bytes / self._rate_Bps
        return self._free_at

    def end(self, busy_s: float) -> None:
        """Note the length of a phase that has ended."""
        self._busy_s += busy_s
        self.sent_bps = 8 * self._bytes / self._busy_s


class _Run:
    """Turns of probes, without load and with it."""

    def __init__(
        self,
        control: socket.socket,
        senders: Mapping[int, socket.socket],
        load: _Load | None,
        effort: Effort,
        draw: random.Random,
    ) -> None:
        self._control, self._senders, self._load, self._effort = control, senders, load, effort
        self._draw = draw
        self._nonce = random.SystemRandom().getrandbits(32)
        self._every_s = len(senders) / effort.rate
        self._tick = 0
        #: Of each probe: level, tick, turn, True if with load, and when it left.
        self._sent: list[tuple[int, int, int, bool, int]] = []
        self._far_drops = 0

    @property
    def is_choked(self) -> bool:
        """True if the far end could not take in the load, so that all levels fare alike there."""
        return self._load is not None and self._far_drops > CHOKED * self._load.packets

    def greet(self, source_port: int, patience_s: float) -> None:
        """Tell the far end who probes, and from where; wait until it listens."""
        self._control.settimeout(patience_s)
        self._control.sendall(HELLO.pack(MAGIC, self._nonce, source_port))
        if receive_exactly(self._control, 1) != READY:
            raise ConnectionError("something else listens there")
        self._control.settimeout(PATIENCE_S)

    def samples(self) -> list[Sample]:
        """Probe for as long as the effort says; returns all probes with what became of them."""
        arrived: dict[int, Arrival] = {}
        _, drops_before = arrivals_from(self._control)
        for turn in range(self._effort.turns):
            self._phase(turn, PROBE_S)
            if self._load is not None:
                self._phase(turn, LEAD_S + PROBE_S, self._load)
            time.sleep(DRAIN_S)
            arrivals, drops = arrivals_from(self._control)
            arrived |= {arrival.number: arrival for arrival in arrivals}
            self._far_drops = max(0, drops - drops_before)
        found = []
        for number, (level, tick, turn, loaded, sent_ns) in enumerate(self._sent):
            came = arrived.get(number)
            delay_s = inf if came is None else (came.at_ns - sent_ns) / 1e9
            dscp = None if came is None else came.traffic_class >> 2
            found.append(Sample(level, tick, turn, loaded, delay_s, dscp))
        return found

    def _phase(self, turn: int, length_s: float, load: _Load | None = None) -> None:
        """Send ticks for ``length_s``; with load, the first begins when a queue may stand."""
        began = now = time.monotonic()
        next_tick = began + (LEAD_S if load is not None else 0.0)
        next_load = load.begin() if load is not None else inf
        while now < began + length_s:
            if now >= next_tick:
                self._send_tick(turn, load is not None)
                next_tick = now + self._every_s
            if load is not None:
                next_load = load.send()
            now = time.monotonic()
            if (idle_s := min(next_tick, next_load, began + length_s) - now) > 0:
                time.sleep(idle_s)
                now = time.monotonic()
        if load is not None:
            load.end(now - began)

    def _send_tick(self, turn: int, loaded: bool) -> None:
        levels = list(self._senders)
        self._draw.shuffle(levels)
        for level in levels:
            packet = PROBE_FORMAT.pack(PROBE, self._nonce, len(self._sent))
            self._sent.append((level, self._tick, turn, loaded, time.time_ns()))
            # Refused by this host's own queue or firewall, it is as lost as elsewhere.
            with contextlib.suppress(OSError):
                self._senders[level].send(packet.ljust(_PROBE_BYTES, b"\0"))
        self._tick += 1


def _with_places(
    verdicts: tuple[LevelVerdict, ...], senders: Mapping[int, socket.socket], here: str, to: str
) -> tuple[tuple[LevelVerdict, ...], tuple[str, ...]]:
    """The verdicts with the places where marks change or get lost; and why some are unknown."""
    # Of a class that loses some packets, a router that does not answer says nothing.
    wrong = [v.level for v in verdicts if v.mark == "remarked" or not v.seen]
    if not wrong:
        return verdicts, ()
    arriving = next((v.level for v in verdicts if v.mark == "kept"), None)
    asked = (*wrong, *(() if arriving is None else (arriving,)))
    until = time.monotonic() + _TRACE_S
    try:
        ttls = sound(here, to, _MAX_TTL, _ANSWER_WAIT_S, until).ttls
        quotes = read_quotes({level: senders[level] for level in asked}, ttls, TRACE, until)
    except PermissionError:
        return verdicts, (f"where marks change is not known: {_NEEDS_RAW}",)
    except ProbeError as error:
        return verdicts, (f"where marks change is not known: {error}",)
    answered = set().union(*quotes.values())
    if not answered:
        return verdicts, ("where marks change is not known: no router answered",)
    silent = sorted(set(ttls) - answered)
    notes = tuple(f"hop {ttl} did not answer: a mark may change there, too" for ttl in silent)
    others = {} if arriving is None else quotes[arriving]

    def placed(one: LevelVerdict) -> LevelVerdict:
        if one.level not in wrong:
            return one
        found = quotes[one.level]
        if one.seen:
            between = changed_between(one.dscp, found, here, to)
        else:
            between = lost_between(found, others, here, to)
        return msgspec.structs.replace(one, between=between)

    return tuple(map(placed, verdicts)), notes
