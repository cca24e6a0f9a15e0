"""The key ``qos`` of a topology file: the DSCP values that Crux may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec

from crux_torch.errors import CruxError, SettingsError
from crux_torch.settings import Marks, Settings, SixBits

Priority = Annotated[int, msgspec.Meta(ge=0, le=7)]


class QosClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One class of the network.

    Attributes:
        dscp: of its packets.
        priority: that NICs and switches map it to (802.1p, and so its PFC priority); None: unsaid.
        lossless: whether PFC is on for that priority.
        ecn: whether switches mark its packets instead of dropping them.
        reserved_by: whose it is; empty: Crux's.
    """

    dscp: SixBits
    priority: Priority | None = None
    lossless: bool = False
    ecn: bool = False
    reserved_by: str = ""

    @property
    def treatment(self) -> str:
        """The class's treatment by PFC and ECN, in words."""
        return f"{'lossless' if self.lossless else 'lossy'} and {'' if self.ecn else 'not '}ECN"


class Qos(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The classes of the levels, from level 0 upwards. A reserved one is a level that Crux leaves.

    Attributes:
        tcp, rdma: of TCP connections, and of queue pairs; empty: they are not marked.
    """

    tcp: tuple[QosClass, ...] = ()
    rdma: tuple[QosClass, ...] = ()

    @property
    def marks(self) -> Marks:
        """The values as settings give them."""
        reserved = {n for classes in (self.tcp, self.rdma) for n in _reserved(classes)}
        usable = (n for n in range(max(len(self.tcp), len(self.rdma))) if n not in reserved)
        tcp, rdma = (tuple(one.dscp for one in classes) for classes in (self.tcp, self.rdma))
        return Marks(tcp, rdma, tuple(usable))

    def check(self) -> None:
        """Raise a CruxError that names what contradicts itself, and why."""
        for name, classes in (("tcp", self.tcp), ("rdma", self.rdma)):
            _check_levels(f"qos.{name}", classes)
        if self.tcp and self.rdma and len(self.tcp) != len(self.rdma):
            raise CruxError(
                f"qos: tcp has {len(self.tcp)} levels and rdma {len(self.rdma)}; expected the same "
                "number, as a job has one level for both"
            )
        if not self.marks.usable:
            raise CruxError("qos: no level is left to Crux; expected one without reserved_by")
        _check_both((*self.tcp, *self.rdma))


def _reserved(classes: Sequence[QosClass]) -> Iterator[int]:
    return (n for n, one in enumerate(classes) if one.reserved_by)


def _check_levels(where: str, classes: Sequence[QosClass]) -> None:
    first: QosClass | None = None
    seen: dict[object, int] = {}
    for n, one in enumerate(classes):
        if (before := seen.setdefault(("dscp", one.dscp), n)) != n:
            raise CruxError(f"{where}[{n}]: DSCP {one.dscp} is that of level {before}, too")
        if one.reserved_by:
            continue
        if one.priority is not None and (before := seen.setdefault(one.priority, n)) != n:
            raise CruxError(
                f"{where}[{n}]: priority {one.priority} is that of level {before}, too: the two "
                "would share a queue"
            )
        first = first or one
        if one.treatment != first.treatment:
            raise CruxError(
                f"{where}[{n}]: {one.treatment}, but DSCP {first.dscp} is {first.treatment}; "
                "expected one treatment for all levels, as a job changes its level while it runs"
            )


def _check_both(classes: Sequence[QosClass]) -> None:
    """A value, and a priority, is one thing in the whole network."""
    of_dscp: dict[int, QosClass] = {}
    of_priority: dict[int, QosClass] = {}
    for one in classes:
        other = of_dscp.setdefault(one.dscp, one)
        if (other.priority, other.treatment, other.reserved_by) != (
            one.priority,
            one.treatment,
            one.reserved_by,
        ):
            raise CruxError(f"qos: DSCP {one.dscp} is described in two ways; expected one")
        if one.priority is None:
            continue
        other = of_priority.setdefault(one.priority, one)
        if other.lossless != one.lossless:
            raise CruxError(
                f"qos: priority {one.priority} is lossless for DSCP "
                f"{(one if one.lossless else other).dscp} and lossy for DSCP "
                f"{(other if one.lossless else one).dscp}; PFC is on or off for a whole priority"
            )


def with_qos(settings: Settings, qos: Qos | None) -> Settings:
    """``settings`` with the maps of the topology.

    Raises:
        SettingsError: the settings have other maps.
    """
    if qos is None or settings.marks == qos.marks:
        return settings
    marks = qos.marks
    if settings.marks:
        raise SettingsError(
            f"CRUX_DSCP_MAP and CRUX_RDMA_DSCP_MAP say {_told(settings.marks)}, but the topology's "
            f"qos says {_told(marks)}: unset them"
        )
    count = max(len(marks.tcp), len(marks.rdma))
    reserved = tuple(n for n in range(count) if n not in marks.usable)
    return replace(
        settings,
        levels=count,
        reserved_levels=reserved,
        dscp_map=marks.tcp,
        rdma_dscp_map=marks.rdma,
    )


def _told(marks: Marks) -> str:
    values = (f"{name} {','.join(map(str, told)) or 'none'}" for name, told in _named(marks))
    return f"{', '.join(values)}, of which levels {','.join(map(str, marks.usable))} may be used"


def _named(marks: Marks) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ("tcp", marks.tcp), ("rdma", marks.rdma)
