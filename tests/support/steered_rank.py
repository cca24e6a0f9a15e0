"""One rank's steering against a transport, groups and a network of the test's."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Sequence
from typing import Any

from control_fakes import FakeClock, until
from dscp_maps import CLASS_SELECTORS

from crux_torch.agent.follower import LOOK_S, SETTLE_S, Steering
from crux_torch.agent.orders import Order
from crux_torch.apply.transport import Connection, Route, TransportError
from crux_torch.apply.wire import Change, QueuePairs
from crux_torch.backend.handover.attempt import GroupStatus, State
from crux_torch.backend.tcp_sockets import TcpSocket
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.live_trace import ConnectionTrace
from crux_torch.network.probe.packets import ProbeError
from crux_torch.network.probe.packets import Transport as Protocol
from crux_torch.network.probe.prober import PathMap, PortSearch
from crux_torch.network.routes import HostRoute
from crux_torch.settings import Marks

#: The two kinds of connection have different values.
MARKS = Marks(CLASS_SELECTORS, tuple(8 * n + 2 for n in range(8)), tuple(range(8)))
SPINES = (("10.100.0.2", "10.100.16.2"), ("10.100.1.2", "10.100.17.2"))


def route(spine: int, src: str = "h0", dst: str = "h1") -> HostRoute:
    address = f"10.{dst[1:]}.0.2"
    return HostRoute(src, dst, (address,), ((2, SPINES[spine]),))


def order(*routes: HostRoute, **changes: Any) -> Order:
    values: dict[str, Any] = {
        "incarnation": "i",
        "number": 1,
        "valid_s": 30.0,
        "level": 5,
        "marks": MARKS,
    }
    return Order(**{**values, **changes}, routes=routes)


def socket_to(peer: str, inode: int, local_port: int = 20001) -> TcpSocket:
    return TcpSocket(7, inode, 2, ("10.0.0.2", local_port), (peer, 5000))


def connection(inode: int, **changes: Any) -> Connection:
    values: dict[str, Any] = dict.fromkeys(Connection.__dataclass_fields__, 0)
    text = dict.fromkeys(("owner", "device", "local", "peer", "via"), "")
    return Connection(
        **{**values, **text, "id": inode, "kind": "tcp", "how": "untouched", **changes}
    )


class FakeTransport:
    def __init__(self) -> None:
        self.sees_sockets, self.sees_queue_pairs = True, False
        self.routes: Sequence[Route] = ()
        self.tellings = 0
        self.ports: tuple[int, int] | None = None
        self.skipped: tuple[int, ...] = ()
        self.known: list[Connection] = []
        self.refuse = False

    def set_routes(self, routes: Sequence[Route]) -> None:
        if self.refuse:
            raise TransportError(errno.ENOMEM, "no")
        self.routes = routes
        self.tellings += 1

    def set_port_range(self, first: int, last: int) -> None:
        self.ports = first, last

    def skip_ports(self, *ports: int) -> None:
        self.skipped = ports

    def connections(self) -> list[Connection]:
        return self.known


class FakeGroups:
    def __init__(self, transport: FakeTransport) -> None:
        self.requests: list[int] = []
        self.moved: list[bool] = []
        self.routes_then: list[Sequence[Route]] = []
        self._transport = transport

    def request(self, generation: int, *, pairs_moved: bool = False) -> None:
        self.requests.append(generation)
        self.moved.append(pairs_moved)
        self.routes_then.append(self._transport.routes)

    state: State = "idle"

    def status(self) -> list[GroupStatus]:
        return [GroupStatus(0, "cpu", generation=g, state=self.state) for g in self.requests[-1:]]


class FakePairs(QueuePairs):
    """Devices that can change a live queue pair, but for those in ``stubborn``."""

    def __init__(self, transport: FakeTransport) -> None:
        self._fake = transport
        self.changes: list[tuple[int, int]] = []
        self.stubborn: set[int] = set()

    def list(self) -> list[Connection]:
        return [one for one in self._fake.known if one.kind == "qp"]

    def change(self, id: int, *, udp_port: Any = None, rate_Bps: Any = None) -> Change:
        if id in self.stubborn:
            return Change("needs_switch", errno.EOPNOTSUPP, "its device has no such call")
        self.changes.append((id, udp_port))
        return Change("live_device", 0, "")


class FakeOwnership:
    def __init__(self) -> None:
        self.sockets: list[TcpSocket] = []
        self.listeners: list[tuple[str, int]] = []

    def owned(self) -> list[TcpSocket]:
        return self.sockets

    def own_listeners(self) -> list[tuple[str, int]]:
        return self.listeners


class FakeNetwork:
    """Answers as the spines do, from the spine that each local port leads over."""

    def __init__(self) -> None:
        self.spine: dict[int, int] = {}
        self.reason = ""
        self.searched: list[str] = []
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.let_go = threading.Event()
        self.let_go.set()

    def __call__(
        self,
        local: tuple[str, int],
        peer: tuple[str, int],
        protocol: Protocol,
        *,
        ttls: Sequence[int],
    ) -> ConnectionTrace:
        self.let_go.wait(30)
        self.asked.append((protocol, tuple(ttls)))
        if self.reason:
            return ConnectionTrace(local, peer, protocol, reason=self.reason)
        spine = SPINES[self.spine[local[1]]][0]
        return ConnectionTrace(local, peer, protocol, tuple((ttl, spine) for ttl in ttls), "raw")

    def search(self, destination: str, route: HostRoute) -> PathMap:
        """Every other port leads over each spine."""
        self.let_go.wait(30)
        self.searched.append(destination)
        if self.reason:
            raise ProbeError(errno.ETIMEDOUT, self.reason)
        hops = {port: ((2, SPINES[port % 2][0]),) for port in range(49152, 49160)}
        return PathMap(
            version=1, source="10.0.0.2", destination=destination, protocol="udp",
            port=ROCE_V2_PORT, hops=hops,
        )  # fmt: skip


class Rank:
    """A steering and all that it touches."""

    def __init__(self) -> None:
        self.transport, self.ownership = FakeTransport(), FakeOwnership()
        self.groups, self.network = FakeGroups(self.transport), FakeNetwork()
        self.clock = FakeClock()
        self.pairs = FakePairs(self.transport)
        self.loads = 0
        self.absent = False
        self.steering = Steering(
            "h0",
            self.ownership,  # type: ignore[arg-type]
            load=self.load,
            groups=self.groups,
            trace=self.network,
            search=PortSearch(self.network.search),
            pairs=lambda: self.pairs,
            ports=(20000, 20999),
            skipped_ports=(29400, 29500),
            clock=self.clock,
        )

    def load(self) -> FakeTransport:
        self.loads += 1
        if self.absent:
            raise TransportError("it is not there: build it")
        return self.transport

    def follow(self, told: Order) -> None:
        self.steering.follow(told)

    def look(self) -> dict[str, Any]:
        """The status after a look at the connections."""
        before = len(self.network.asked)
        self.steering.tick()
        self.clock.advance(LOOK_S + SETTLE_S)
        self.steering.tick()
        until(lambda: len(self.network.asked) >= before + 1, what="a look")
        assert self.steering._looking is not None
        self.steering._looking.join(60)
        status: dict[str, Any] = json.loads(json.dumps(self.steering.status()))
        return status

    def has_requested(self, *generations: int) -> None:
        until(lambda: self.groups.requests == list(generations), what="the handover")
        assert self.steering._searching is not None
        self.steering._searching.join(60)

    def soon(self) -> None:
        """Let a look that is due after a change begin."""
        self.steering.tick()
        self.clock.advance(SETTLE_S)
        self.steering.tick()
