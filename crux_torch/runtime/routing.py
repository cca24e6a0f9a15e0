"""The leader's half of path selection: from the plan's candidates to routes, and when to switch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import CruxError
from crux_torch.fabric.route import HostRoute, Routes, routes_of
from crux_torch.fabric.topology import Topology
from crux_torch.profile.job_profile import HostFlow

_log = logging.getLogger(__name__)

#: Seconds between two switches at least: jobs that come and go shift everyone's paths.
SWITCH_PAUSE_S = 10.0
#: Switches that are tried again because connections missed their paths; the pause doubles.
MAX_RETRIES = 3

ReadTopology = Callable[["bytes | None"], "Topology | None"]

_NONE = Routes((), ())


class Wanted(NamedTuple):
    """What the ranks are told.

    Attributes:
        routes: of all hosts of the job; empty: the network decides.
        switch: generation of the connections, 0 for those that the job began with; they are to be
            made anew where it has grown.
    """

    routes: tuple[HostRoute, ...]
    switch: int


class Routing:
    """Resolves paths in the topology in which they were chosen, and counts switches.

    Connections are made anew only where the routes differ from those for which that was done
    last: a change of levels does not do it, nor a plan that was lost and comes back.

    Args:
        read_topology: the topology in the bytes that the store has; None where it can't be read.
        first_switch: number of the first switch: above all of which the job's store may know.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        read_topology: ReadTopology,
        *,
        first_switch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_topology = read_topology
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._of: object = None
        self._resolved = _NONE
        self._switched: tuple[HostRoute, ...] = ()
        self._switch = 0
        self._next_switch = first_switch
        self._retries = 0
        self._not_before_s = float("-inf")

    @property
    def problems(self) -> tuple[str, ...]:
        """Why some of the plan's paths can't be taken."""
        return self._resolved.problems

    def resolve(
        self, path: tuple[int, ...], flows: Sequence[HostFlow], topology: bytes | None
    ) -> None:
        """Want what a plan says.

        Args:
            path: a candidate's index for each flow; empty: the network decides.
            flows: of the job, as the plan knew them.
            topology: that the plan was made in, as the store has it.
        """
        of = (path, flows, topology)
        if of != self._of:
            self._of, self._resolved = of, self._routes(path, flows, topology)

    def forget(self) -> None:
        """Want nothing: there is no plan."""
        self._of, self._resolved = None, _NONE

    def wanted(self, *, may_switch: bool = True, missed: int = 0) -> Wanted:
        """What the ranks are to be told now.

        Args:
            may_switch: whether connections may be made anew now; if not, later.
            missed: connections that were seen not to take their path though they might: their
                search for a port was cut short, by a busy host or by lost probes.
        """
        routes, now = self._resolved.routes, self._clock()
        if not routes or not may_switch or now < self._not_before_s:
            return Wanted(routes, self._switch)
        again = routes == self._switched
        if not again or (missed and self._retries < MAX_RETRIES):
            self._retries = self._retries + 1 if again else 0
            self._switched = routes
            self._switch, self._next_switch = self._next_switch, self._next_switch + 1
            self._not_before_s = now + SWITCH_PAUSE_S * 2**self._retries
        return Wanted(routes, self._switch)

    def _routes(
        self, path: tuple[int, ...], flows: Sequence[HostFlow], topology: bytes | None
    ) -> Routes:
        known = self._read_topology(topology) if path else None
        if known is None:
            return _NONE
        try:
            found = routes_of(path, flows, known)
        except (ValueError, CruxError) as error:
            self._warn("path", f"the plan's paths are not this job's: {error}")
            return Routes((), (str(error),))
        if found.problems:
            self._warn(
                "addresses",
                "paths of the plan that can't be taken, because the topology has "
                + "; ".join(found.problems),
            )
        return found
