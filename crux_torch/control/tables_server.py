"""The service of the load tables: one process for any number of switches.

    python -m crux_torch.control.tables_server --fd N [--slot-s S] [--secret FILE]

It is a server of the store's frames with other contents. Each ``cruxrun`` of its host keeps it
running, as it does the store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from crux_torch.control.tables_frames import (
    Answer,
    Feedback,
    FetchFeedback,
    Request,
    UpdateSchedule,
    request_decoder,
)
from crux_torch.schedule.load_tables import LoadTables
from crux_torch.schedule.rates import SLOT_S, SLOTS
from crux_torch.store.contents import Client
from crux_torch.store.frames import Done, Refused
from crux_torch.store.server import arguments, serve

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
            path = self._tables.feedback(request.flow, request.links, now)
            loads = tuple(link.load_Bps for link in path)
            return Feedback(now, gone, self._tables.slot_s, loads)
        if not isinstance(request, UpdateSchedule):
            return Refused("not kept here")
        if not now - SLOTS < request.slot <= now:
            return Refused(f"slot {request.slot} is not of now, which is {now}")
        if len(self._tables) >= MAX_FLOWS and request.flow not in self._tables:
            return Refused("the tables are full")
        for link, moved in request.counters.items():
            self._tables.count(link, now, moved)
        about = request.flow, request.links, request.slot, request.rates_Bps, request.sent
        booked = self._tables.book(*about, job=request.job)
        return Done(int(booked))

    def leave(self, client: Client) -> None:
        """Nothing is kept by client."""

    def expire(self) -> None:
        """Forget whoever fell silent."""
        self._tables.expire(int(self._clock() / self._tables.slot_s))


if __name__ == "__main__":
    parser = arguments("crux-tables")
    parser.add_argument("--slot-s", type=float, default=SLOT_S)
    args = parser.parse_args()
    serve(args, partial(TablesService, slot_s=args.slot_s))
