"""One rank follows its leader: its connections' class and paths, its host's links, its pace."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from crux_torch.apply.classes import TrafficClass
from crux_torch.apply.link_routes import make_links
from crux_torch.apply.nccl_labels import LABELS
from crux_torch.c10d.ownership import Ownership
from crux_torch.control.records import PathCounts
from crux_torch.host.nvml_device import OwnDevice
from crux_torch.measure.job_profile import JobProfile
from crux_torch.measure.record import GroupInfo
from crux_torch.runtime.order import Order
from crux_torch.runtime.pace_keeper import PaceKeeper
from crux_torch.runtime.rate_scheduler import RateScheduler
from crux_torch.runtime.steer import make_steering
from crux_torch.settings import Settings
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)


class Follower:
    """Carries out the newest order in this process. One background thread owns it.

    The connections to ``store``, the job's, are left alone.
    """

    def __init__(
        self,
        settings: Settings,
        host: str,
        ownership: Ownership,
        store: Any,
        device: OwnDevice,
        pace: PaceKeeper,
        rates: Callable[[TrafficClass], RateScheduler],
    ) -> None:
        self._traffic_class = TrafficClass(ownership)
        self._steering = make_steering(settings, host, ownership, store)
        self._links = make_links(settings, device)
        self._pace = pace
        self._rates = rates(self._traffic_class)
        self._warn = WarnOnce(_log)
        #: What is in force; None before the first order, and after the leader fell silent.
        self.order: Order | None = None
        #: The job's profile, as the leader told it last.
        self.profile: JobProfile | None = None
        self._heard = ("", 0)
        self._heard_at_s = float("-inf")

    @property
    def qp_dscp(self) -> int | None:
        """DSCP that the plan gives this job's queue pairs; None before it does, while measuring,
        and where they are not marked.

        What keeps its class for life must not keep that of a measurement.
        """
        order = self.order
        return None if order is None or order.measuring else order.qp_dscp

    def hear(self, raw: bytes) -> Order | None:
        """The order in ``raw``, if it is new. Its class and links are set, its paths are not."""
        try:
            order = Order.from_json(raw)
        except ValueError as error:
            self._warn("malformed", f"ignoring what the job's leader says: {error}")
            return None
        heard = order.incarnation, order.number
        # An order that has ended may still lie in the store.
        if heard == self._heard or order.number < self._heard[1]:
            return None
        before, self.order = self.order, order
        self._heard, self._heard_at_s = heard, time.monotonic()
        self.profile = order.profile or self.profile
        if before is None or (order.level, order.marks) != (before.level, before.marks):
            if order.level is None or order.marks is None or not order.marks.tcp:
                self._traffic_class.revert()
            else:
                self._traffic_class.apply_level(order.level, order.marks.tcp)
        priority = order.entry.priority if order.entry is not None else 0.0
        self._links.follow(order.incarnation, order.level, priority)
        self._pace.follow(order.pace)
        self._rates.follow(order.flows, order.tables)
        return order

    def steer(self, order: Order) -> None:
        """Follow the paths of ``order``; raises what :meth:`Steering.follow` does."""
        self._steering.follow(order)

    def check(self) -> None:
        """Go back to the network's defaults if nothing was heard of the leader for too long."""
        order = self.order
        if order is not None and time.monotonic() - self._heard_at_s >= order.valid_s:
            _log.warning("nothing heard from the job's leader: back to the network's default class")
            self.order = None
            self._traffic_class.revert()
            self._steering.revert()
            self._links.revert()
            self._pace.follow(None)
            self._rates.revert()
        self._rates.check()
        LABELS.set_dscp(self.qp_dscp or 0)

    def refresh(self) -> PathCounts | None:
        """Apply what is in force to new connections; how many take their paths."""
        self._traffic_class.refresh()
        self._steering.tick()
        return self._steering.counts()

    def gate(self, groups: Sequence[GroupInfo]) -> None:
        """Let the operations of ``groups`` give way on links that other jobs use, too."""
        self._links.tick(groups)

    def revert(self) -> None:
        """Take everything back. Raises an error after it has tried the rest."""
        self._pace.remove()
        with contextlib.ExitStack() as stack:
            # The last one comes first: rates are limits on what the class has marked.
            for part in (self._links, self._steering, self._traffic_class, self._rates):
                stack.callback(part.revert)

    def status(self) -> dict[str, Any]:
        """Plain values for :func:`crux_torch.status`."""
        report = self._traffic_class.status()
        return {
            "applied": {
                "level": report.level,
                "dscp": report.dscp,
                "marked": report.applied,
                "refused": report.refused,
                "error": report.error or None,
                "sockets": [
                    {
                        "local": mark.local,
                        "peer": mark.peer,
                        "dscp": None if mark.tos is None else mark.tos >> 2,
                        "applied": mark.applied,
                        "error": os.strerror(mark.errno) if mark.errno else None,
                    }
                    for mark in report.marks
                ],
            },
            "paths": self._steering.status(),
            "links": self._links.status(),
            "pace": self._pace.status(),
            "rates": self._rates.status(),
        }
