"""What a leader tells the ranks of its job, as JSON through the job's own store."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crux_torch.control.records import PlanEntry
from crux_torch.fabric.route import HostRoute
from crux_torch.profile.job_profile import MAX_FLOWS, JobProfile, Name

SCHEMA_VERSION = 1


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One order; a rank follows the newest until ``valid_s`` after it last heard from its leader.

    Attributes:
        incarnation: of the job; a rank that is told another one starts afresh.
        turn: grows with every order, renewals included.
        level: priority level of the job's connections; None for the network's default.
        measurement: number of the measurement that runs or ran last, 0 before the first.
        measuring: whether it runs now.
        valid_s: seconds for which the order counts.
        plan_epoch: epoch of the plan that the level comes from, 0 without one.
        entry: the job's part of that plan.
        profile: the job's profile, once it was measured.
        routes: the paths that connections made from now on are to take; empty: any.
        switch: generation of the job's connections, 0 for those that it began with; where it grows
            they are made anew.
    """

    version: int = SCHEMA_VERSION
    incarnation: Name
    turn: Annotated[int, msgspec.Meta(ge=1)]
    level: Annotated[int, msgspec.Meta(ge=0, le=63)] | None = None
    measurement: Annotated[int, msgspec.Meta(ge=0)] = 0
    measuring: bool = False
    valid_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
    plan_epoch: Annotated[int, msgspec.Meta(ge=0)] = 0
    entry: PlanEntry | None = None
    profile: JobProfile | None = None
    routes: Annotated[tuple[HostRoute, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    switch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0

    def to_json(self) -> bytes:
        """The order as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> Order:
        """The order in ``raw``.

        Raises:
            ValueError: it is not such an order, or of another version.
        """
        try:
            order = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"not an order: {error}") from None
        if order.version != SCHEMA_VERSION:
            raise ValueError(f"an order of version {order.version}, not {SCHEMA_VERSION}")
        return order
