"""The service of the load tables (mlcc §V), one process for any number of switches; its client.

    python -m crux_torch.agreement.load_tables --fd N [--slot-s S] [--secret FILE]

It is a server of the store's frames with other contents. Each ``cruxrun`` of its host keeps it
running, as it does the store. Flows and links are named by the hosts, which all have the topology.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from crux_torch.errors import Cause, StoreError
from crux_torch.schedule.papers.mlcc import SLOT_S, SLOTS
from crux_torch.schedule.papers.mlcc_tables import LoadTables
from crux_torch.store.client import Connection, Connector, cause_of
from crux_torch.store.contents import Client
from crux_torch.store.frames import Count, Done, Message, Refused, mark
from crux_torch.store.server import arguments, serve

#: Links of one path at most.
MAX_LINKS = 32

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Host = Annotated[str, Meta(max_length=512)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
Capacity = Annotated[float, Meta(gt=0.0, le=1e18)]
Slot = Annotated[int, Meta(ge=0, lt=1 << 53)]
Links = Annotated[dict[Name, Capacity], Meta(min_length=1, max_length=MAX_LINKS)]
Rates = Annotated[tuple[Amount, ...], Meta(max_length=SLOTS)]
ByHost = Annotated[dict[Host, Amount], Meta(max_length=4096)]


class FetchFeedback(Message, frozen=True, tag="fetch"):
    """Request for the load of the path of ``flow``.

    Attributes:
        links: the capacity of each, in bytes per second.
        job, src, dst: its job and hosts, where it depends on the job's other flows; else empty.
    """

    flow: Name
    links: Links
    job: Host = ""
    src: Host = ""
    dst: Host = ""


class Feedback(Message, frozen=True, tag="feedback"):
    """The answer.

    Attributes:
        slot: the number of the current one.
        gone: share of it that has passed.
        slot_s: seconds of a slot.
        loads_Bps: of each link in the order asked, what others have booked in each slot.
        into, out: as ``LoadTables.neighbours`` gives them; empty where not asked for.
    """

    slot: Slot
    gone: Annotated[float, Meta(ge=0.0, le=1.0)]
    slot_s: Annotated[float, Meta(gt=0.0, le=10.0)]
    loads_Bps: Annotated[tuple[Rates, ...], Meta(max_length=MAX_LINKS)]
    into: ByHost = msgspec.field(default_factory=dict)
    out: ByHost = msgspec.field(default_factory=dict)


class UpdateSchedule(Message, frozen=True, tag="update"):
    """Book ``rates_Bps`` from ``slot`` on, in place of what the flow had; none: it has ended.

    Attributes:
        sent: bytes that the flow has sent so far.
        counters: bytes that went over links so far, foreign flows' included, by an interface.
        src, dst: its hosts, where other flows of the job depend on it; else empty.
        by_end: F_i, bytes of the iteration that it will have sent by the end of the slot.
    """

    flow: Name
    links: Links
    slot: Slot
    rates_Bps: Rates
    sent: Amount
    job: Name
    counters: Annotated[dict[Name, Amount], Meta(max_length=MAX_LINKS)]
    src: Host = ""
    dst: Host = ""
    by_end: Amount = 0.0


Request = FetchFeedback | UpdateSchedule | Count
Answer = Feedback | Done | Refused
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


#: Seconds that one exchange may take, connecting included, and from a failure to the next attempt.
TIMEOUT_S = 0.2
RETRY_S = 1.0

A = TypeVar("A", bound=Answer)


class TablesClient:
    """A host's connection to the service. Thread safety: none.

    Args:
        connector: makes the connections to it.
        secret: of the store, which the service shares.
        dscp: class of its packets, 0 to 63. They cross the queues that the tables are about.

    Every call raises StoreError where there is no answer in time.
    """

    def __init__(self, connector: Connector, secret: bytes = b"", *, dscp: int = 0) -> None:
        self._connector = connector
        self._where = connector.where.replace("store", "load tables at", 1)
        self._secret, self._dscp = secret, dscp
        self._connection: Connection | None = None
        self._retry_at_s = float("-inf")

    def fetch_feedback(
        self, flow: str, links: Mapping[str, float], job: str = "", src: str = "", dst: str = ""
    ) -> Feedback:
        """Return the load of the path of ``flow``, as :class:`FetchFeedback` asks for it."""
        answer = self._ask(FetchFeedback(flow, dict(links), job, src, dst), Feedback)
        if len(answer.loads_Bps) != len(links) or not all(answer.loads_Bps):
            raise self._failed("an answer about another path", Cause.STRANGER)
        return answer

    def update_schedule(self, schedule: UpdateSchedule) -> bool:
        """Return True if these rates are booked."""
        return self._ask(schedule, Done).count > 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: Request, kind: type[A]) -> A:
        deadline_s = time.monotonic() + TIMEOUT_S
        if self._connection is None and time.monotonic() < self._retry_at_s:
            raise StoreError(f"{self._where}: another attempt is not due yet")
        try:
            if self._connection is None:
                connected = self._connector.connect(TIMEOUT_S)
                try:
                    if self._dscp:
                        mark(connected, self._dscp)
                    self._connection = Connection(connected, self._secret, deadline_s)
                except BaseException:
                    connected.close()
                    raise
            answer = self._connection.ask(request, deadline_s, answer_decoder)
        except (OSError, EOFError, ValueError) as error:
            cause = cause_of(error, greeted=self._connection is not None)
            late = isinstance(error, TimeoutError)
            reason = f"no answer within {TIMEOUT_S} s" if late else str(error)
            raise self._failed(reason, cause) from None
        if isinstance(answer, Refused):
            raise StoreError(f"{self._where}: {answer.reason}")
        if not isinstance(answer, kind):
            raise self._failed("an answer to another question", Cause.STRANGER)
        return answer

    def _failed(self, reason: str, cause: Cause) -> StoreError:
        self.close()
        self._retry_at_s = time.monotonic() + RETRY_S
        return StoreError(f"{self._where}: {reason}", cause)


#: Flows that the tables hold at most. Those that fall silent are forgotten within a second.
MAX_FLOWS = 65_536


class TablesService:
    """The tables, by a clock.

    Args:
        clock: seconds, never back.
        slot_s: seconds of one slot.
    """

    decoder = request_decoder

    def __init__(self, clock: Callable[[], float], slot_s: float = SLOT_S) -> None:
        self._clock = clock
        self._tables = LoadTables(SLOTS, slot_s)

    def answer(self, request: Request, client: Client) -> Answer:
        """Carry out ``request``; any client may speak for any flow."""
        slot, gone = divmod(self._clock() / self._tables.slot_s, 1.0)
        now = int(slot)
        if isinstance(request, FetchFeedback):
            family = request.job if request.src else ""
            path = self._tables.feedback(request.flow, request.links, now, family)
            loads = tuple(link.load_Bps for link in path)
            answer = Feedback(now, gone, self._tables.slot_s, loads)
            if not request.src:
                return answer
            into, out = self._tables.neighbours(request.job, request.src, request.dst)
            return msgspec.structs.replace(answer, into=into, out=out)
        if not isinstance(request, UpdateSchedule):
            return Refused("not kept here")
        if not now - SLOTS < request.slot <= now:
            return Refused(f"slot {request.slot} is not of now, which is {now}")
        if len(self._tables) >= MAX_FLOWS and request.flow not in self._tables:
            return Refused("the tables are full")
        for link, moved in request.counters.items():
            self._tables.count(link, now, moved)
        booked = self._tables.book(
            request.flow, request.links, request.slot, request.rates_Bps, request.sent,
            job=request.job, ends=(request.src, request.dst), by_end=request.by_end,
        )  # fmt: skip
        return Done(int(booked))

    def leave(self, client: Client) -> None:
        """Nothing is kept by client."""

    def expire(self) -> None:
        """Forget the flows that fell silent."""
        self._tables.expire(int(self._clock() / self._tables.slot_s))


if __name__ == "__main__":
    parser = arguments("crux-tables")
    parser.add_argument("--slot-s", type=float, default=SLOT_S)
    args = parser.parse_args()
    serve(args, partial(TablesService, slot_s=args.slot_s))
