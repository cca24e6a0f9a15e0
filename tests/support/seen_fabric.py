"""What jobs see of a leaf-spine network whose routers answer from where a probe came in by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from control_fakes import profile, record

from crux_torch.agreement.records import JobRecord
from crux_torch.measure.profile import HostFlow
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath

LINK_Bps = 12.5e6


class Host(NamedTuple):
    """The ``k``-th host below a leaf, as lab/fabric.py numbers them."""

    leaf: int
    k: int

    @property
    def name(self) -> str:
        return f"h{self.leaf}-{self.k}"

    @property
    def address(self) -> str:
        return f"10.{self.leaf}.{self.k}.2"


def hops(src: Host, dst: Host, spine: int) -> tuple[str, ...]:
    """The answers on the way over one spine."""
    first = f"10.{src.leaf}.{src.k}.1"
    up, down = 16 * src.leaf + spine, 16 * dst.leaf + spine
    return first, f"10.100.{up}.2", f"10.100.{down}.1"


def seen(src: Host, dst: Host, spines: Iterable[int], connections: int = 0) -> SeenPair:
    """Paths from one host to another over these spines."""
    paths = tuple(SeenPath(hops(src, dst, j), connections=connections) for j in spines)
    return SeenPair(src.name, src.address, dst.name, dst.address, paths, 0.99)


def host(of: Host, speed_Bps: float = LINK_Bps) -> SeenHost:
    return SeenHost(of.name, (SeenNic("eth0", (of.address,), speed_Bps),))


def fragment(hosts: Sequence[Host], spines: Sequence[int] = (0, 1)) -> Fragment:
    """All paths between these hosts, which are below different leaves."""
    pairs = tuple(seen(a, b, spines) for a in hosts for b in hosts if a.leaf != b.leaf)
    return Fragment.of(hosts=tuple(map(host, hosts)), pairs=pairs)


def ring(name: str, hosts: Sequence[Host], size: float = 1e6, **changes: object) -> JobRecord:
    """A job that moves bytes around its hosts."""
    flows = tuple(
        HostFlow(a.name, b.name, size) for a, b in zip(hosts, (*hosts[1:], hosts[0]), strict=True)
    )
    told = profile(flows=flows, t_source="topology", compute_s=0.05, period_s=0.2)
    values = {"hosts": tuple(h.name for h in hosts), "gpus": len(hosts), "profile": told}
    return record(name, **{**values, **changes})
