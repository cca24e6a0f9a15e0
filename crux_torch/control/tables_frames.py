"""What hosts and the service of the load tables say to each other (mlcc §V), in the store's frames.

Flows and links are named by the hosts, which all have the topology.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from crux_torch.schedule.rates import SLOTS
from crux_torch.store.frames import Count, Done, Message, Refused

#: Links of one path at most.
MAX_LINKS = 32

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
Capacity = Annotated[float, Meta(gt=0.0, le=1e18)]
Slot = Annotated[int, Meta(ge=0, lt=1 << 53)]
Links = Annotated[dict[Name, Capacity], Meta(min_length=1, max_length=MAX_LINKS)]
Rates = Annotated[tuple[Amount, ...], Meta(max_length=SLOTS)]


class FetchFeedback(Message, frozen=True, tag="fetch"):
    """How loaded is the path of ``flow``? ``links``: the capacity of each, in bytes per second."""

    flow: Name
    links: Links


class Feedback(Message, frozen=True, tag="feedback"):
    """The answer.

    Attributes:
        slot: the number of the current one.
        gone: share of it that has passed.
        slot_s: seconds of a slot.
        loads_Bps: of each link in the order asked, what others have booked in each slot.
    """

    slot: Slot
    gone: Annotated[float, Meta(ge=0.0, le=1.0)]
    slot_s: Annotated[float, Meta(gt=0.0, le=10.0)]
    loads_Bps: Annotated[tuple[Rates, ...], Meta(max_length=MAX_LINKS)]


class UpdateSchedule(Message, frozen=True, tag="update"):
    """Book ``rates_Bps`` from ``slot`` on, in place of what the flow had; none: it has ended.

    Attributes:
        sent: bytes that the flow has sent so far.
        job: whose flow it is.
        counters: bytes that went over links so far, foreign flows' included, by an interface.
    """

    flow: Name
    links: Links
    slot: Slot
    rates_Bps: Rates
    sent: Amount
    job: Name
    counters: Annotated[dict[Name, Amount], Meta(max_length=MAX_LINKS)]


Request = FetchFeedback | UpdateSchedule | Count
Answer = Feedback | Done | Refused
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
