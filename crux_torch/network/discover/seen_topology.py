"""A network that was joined from fragments, on which each job keeps to the paths that it saw.

What others claim to have seen adds links, and no path of another job crosses them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from crux_torch.network.discover.evidence import Nic, canonical
from crux_torch.network.discover.fragment import Fragment
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.topology import CANDIDATE_LIMIT, Path, Topology

Hosts = tuple[str, str]


class SeenTopology(Topology):
    """The joined network, and the paths that each job saw.

    Args:
        fragments: by job.

    Raises:
        TopologyError: they are of no network that a topology could describe.
    """

    is_given = False

    def __init__(self, fragments: Mapping[str, Fragment]) -> None:
        self._joined: Discovered = join(fragments)
        self.__dict__.update(self._joined.topology.__dict__)
        self.left_out = self._joined.left_out
        self._fragments = {job: f for job, f in fragments.items() if job not in self.left_out}
        self._addresses, self._node_at = dict(self.addresses), dict(self.node_at)
        self._own: dict[Hosts, tuple[Path, ...]] = {}
        self._views: dict[str, SeenTopology] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """See :attr:`~crux_torch.network.discover.join.Discovered.notes`."""
        return self._joined.notes

    def as_seen_by(self, job: str) -> SeenTopology:
        """Returns the network with the candidates of ``job``: the paths that it saw.

        The addresses of the hosts of ``job`` are those that it gave.
        """
        view = self._views.get(job)
        if view is None:
            view = SeenTopology.__new__(SeenTopology)
            view.__dict__.update(self.__dict__)
            view._take(self._fragments.get(job, Fragment()))
            self._views[job] = view
        return view

    def sees(self, src: str, dst: str) -> bool:
        """True if the job saw a path from one host to the other."""
        return (src, dst) in self._own

    def candidate_paths(
        self, src: str, dst: str, limit: int | None = CANDIDATE_LIMIT
    ) -> tuple[Path, ...]:
        """The paths that the job saw, else as :meth:`Topology.candidate_paths`."""
        own = self._own.get((src, dst))
        return own[:limit] if own is not None else super().candidate_paths(src, dst, limit)

    def _take(self, fragment: Fragment) -> None:
        """Keep to the paths and addresses in ``fragment``."""
        joined, nic_at = self._joined, dict[str, Nic]()
        addresses: dict[str, tuple[str, ...]] = {}
        for host in fragment.hosts:
            for given in host.nics:
                nic = Nic(host.name, given.name)
                own = [a for a in map(canonical, given.addresses) if a is not None]
                for address in own:
                    nic_at.setdefault(address, nic)
                if nic in joined.node_of:
                    addresses[joined.node_of[nic]] = tuple(own)
        node_at = {a: joined.node_of[nic] for a, nic in nic_at.items() if nic in joined.node_of}
        self.addresses = ChainMap(addresses, self._addresses)
        self.node_at = ChainMap(node_at, self._node_at)
        found: dict[Hosts, dict[Path, None]] = {}
        for pair in fragment.pairs:
            src, dst = (
                nic_at.get(canonical(a) or "") for a in (pair.src_address, pair.dst_address)
            )
            # Each packet of a sprayed pair takes another path, so none can be planned.
            if src is None or dst is None or pair.sprays:
                continue
            # In the order of the addresses: names of routers depend on what others claim.
            for hops in sorted((path.hops for path in pair.paths), key=str):
                path = joined.path_between(src, dst, hops)
                if path is not None:
                    found.setdefault((src.host, dst.host), {})[path] = None
        self._own = {hosts: tuple(paths) for hosts, paths in found.items()}
