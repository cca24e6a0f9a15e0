"""Finds UDP source ports that lead over planned paths, for queue pairs (RoCEv2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from crux_torch.fabric.ecmp import ROCE_V2_PORT
from crux_torch.fabric.route import HostRoute
from crux_torch.probe.path_map import PathMap
from crux_torch.probe.prober import Rules, probe
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: Ports to find for each path. Queue pairs to one peer share them in turn.
PORTS = 16
#: Seconds that the search may take for one path, and for all: other ranks may wait to switch.
SEARCH_S = 5.0
TOTAL_S = 15.0

#: (address, hops): the map of a search over those TTLs that ends with enough ports over them.
Search = Callable[[str, HostRoute], PathMap]


def search(destination: str, route: HostRoute) -> PathMap:
    """Probe until ``PORTS`` source ports are known to take ``route``, or time is up.

    Raises:
        OSError: nobody answered, or probing is not permitted.
    """
    rules = Rules(via=route.hops, via_ports=PORTS, time_limit_s=SEARCH_S)
    return probe(destination, ROCE_V2_PORT, "udp", ttls=[ttl for ttl, _ in route.hops], rules=rules)


class PortSearch:
    """Finds ports by ``search``, and keeps them while their route is wanted."""

    def __init__(
        self, search: Search = search, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._search = search
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._found: dict[tuple[str, HostRoute], tuple[int, ...]] = {}

    def found(self, routes: Iterable[HostRoute]) -> Mapping[str, tuple[int, ...]]:
        """The known ports for each destination."""
        return {to: self._found[to, r] for to, r in _searches(routes) if (to, r) in self._found}

    def is_done(self, routes: Iterable[HostRoute]) -> bool:
        """Whether ``run`` would have nothing to do."""
        return all(each in self._found for each in _searches(routes))

    def run(self, routes: Iterable[HostRoute]) -> None:
        """Search for the ports that are not known; begin no search after ``TOTAL_S``.

        If none is found for a path, or ports do not decide the path, its queue pairs go where the
        network sends them.
        """
        until_s = self._clock() + TOTAL_S
        wanted = list(_searches(routes))
        self._found = {each: ports for each, ports in self._found.items() if each in wanted}
        for to, route in wanted:
            if (to, route) in self._found:
                continue
            ports: tuple[int, ...] = ()
            try:
                if self._clock() >= until_s:
                    raise TimeoutError(f"no time was left, {TOTAL_S:g} s went into other paths")
                path_map = self._search(to, route)
                ports = path_map.ports_via(route.hops)[:PORTS]
                problem = "" if ports else "no source port leads over it"
                if path_map.changed:
                    ports = ()
                    problem = (
                        f"{path_map.changed} of {path_map.repeated} source ports took another path "
                        "when they were probed again, so the network sprays packets or has changed"
                    )
            except OSError as error:
                problem = str(error)
            if problem:
                self._warn(to, f"the planned path to {to} is not taken by queue pairs: {problem}")
            self._found[to, route] = ports


def _searches(routes: Iterable[HostRoute]) -> Iterable[tuple[str, HostRoute]]:
    return ((to, route) for route in routes for to in route.destinations)
