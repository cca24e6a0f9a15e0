"""DSCP values that Crux may use: the key ``qos`` of a topology file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec

from crux_torch.errors import CruxError, SettingsError
from crux_torch.settings import Marks, Name, Settings, SixBits

Priority = Annotated[int, msgspec.Meta(ge=0, le=7)]


class QosClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One class of the network.

    Attributes:
        dscp: of its packets.
        priority: that NICs and switches map it to (802.1p, and so its PFC priority); None: unsaid.
        lossless: True if PFC is on for that priority.
        ecn: True if switches mark its packets instead of dropping them.
        reserved_by: its owner; empty: Crux.
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
        programs: the highest level of each program that ``crux exec`` may mark.
    """

    tcp: tuple[QosClass, ...] = ()
    rdma: tuple[QosClass, ...] = ()
    programs: dict[Name, SixBits] = msgspec.field(default_factory=dict)

    @property
    def marks(self) -> Marks:
        """The values as settings give them."""
        both = self.tcp, self.rdma
        reserved = {n for classes in both for n, one in enumerate(classes) if one.reserved_by}
        usable = (n for n in range(max(map(len, both))) if n not in reserved)
        tcp, rdma = (tuple(one.dscp for one in classes) for classes in both)
        return Marks(tcp, rdma, tuple(usable))

    def check(self) -> None:
        """Raise a CruxError that names what contradicts itself, and why."""
        _check_levels("qos.tcp", self.tcp)
        _check_levels("qos.rdma", self.rdma)
        if self.tcp and self.rdma and len(self.tcp) != len(self.rdma):
            raise CruxError(
                f"qos: tcp has {len(self.tcp)} levels and rdma {len(self.rdma)}; expected the same "
                "number, as a job has one level for both"
            )
        if not self.marks.usable:
            raise CruxError("qos: no level is left to Crux; expected one without reserved_by")
        _check_both((*self.tcp, *self.rdma))
        for name, level in self.programs.items():
            if level not in self.marks.plan_levels:
                raise CruxError(f"qos.programs.{name}: {_expected(self.marks)}, got {level}")


def _check_levels(where: str, classes: Sequence[QosClass]) -> None:
    """Each level has its own value and queue, and all levels of Crux have one treatment."""
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
    lossless: dict[tuple[int, bool], QosClass] = {}
    for one in classes:
        if of_dscp.setdefault(one.dscp, one) != one:
            raise CruxError(f"qos: DSCP {one.dscp} is described in two ways; expected one")
        if one.priority is None:
            continue
        lossless[one.priority, one.lossless] = one
        yes, no = lossless.get((one.priority, True)), lossless.get((one.priority, False))
        if yes and no:
            raise CruxError(
                f"qos: priority {one.priority} is lossless for DSCP {yes.dscp} and lossy for DSCP "
                f"{no.dscp}; PFC is on or off for a whole priority"
            )


def with_qos(settings: Settings, qos: Qos | None) -> Settings:
    """Returns ``settings`` with the maps of the topology.

    Raises:
        SettingsError: the settings have other maps.
    """
    if qos is None or settings.marks == qos.marks:
        return settings
    marks = qos.marks
    if settings.marks:
        raise SettingsError(
            f"CRUX_DSCP_MAP and CRUX_RDMA_DSCP_MAP say {_text(settings.marks)}, but the topology's "
            f"qos says {_text(marks)}: unset them"
        )
    count = max(len(marks.tcp), len(marks.rdma))
    return replace(
        settings,
        levels=count,
        reserved_levels=tuple(n for n in range(count) if n not in marks.usable),
        dscp_map=marks.tcp,
        rdma_dscp_map=marks.rdma,
    )


def program_level(settings: Settings, qos: Qos | None, name: str, level: int | None = None) -> int:
    """Returns the level of a program that is no job: ``level``, or by default its highest.

    Args:
        settings: with the maps of the topology (:func:`with_qos`).
        qos: of the topology; its programs count in place of those of the settings.

    Raises:
        SettingsError: the operator does not allow that program, or not that level.
    """
    marks = settings.marks
    if not marks:
        raise SettingsError(
            "no DSCP values are set: give CRUX_DSCP_MAP or CRUX_RDMA_DSCP_MAP, or a topology with "
            "`qos` (docs/operate/classes.md)"
        )
    if qos is not None:
        highest: dict[str, int] = dict(qos.programs)
        where, line = "the topology's qos.programs", f"{name}: LEVEL"
    else:
        highest = {one: int(most) for one, _, most in (p.partition(":") for p in settings.programs)}
        where, line = "CRUX_PROGRAMS", f"{name}:LEVEL"
    if name not in highest:
        known = ", ".join(sorted(highest)) or "nobody"
        raise SettingsError(f"{where} allows {known}, not {name!r}: the operator can add {line!r}")
    most = highest[name]
    level = most if level is None else level
    if level > most:
        raise SettingsError(f"level {level} is not allowed: {where} gives {name!r} up to {most}")
    if level not in marks.plan_levels:
        raise SettingsError(f"level of {name!r}: {_expected(marks)}, got {level}")
    return level


def _expected(marks: Marks) -> str:
    levels = ", ".join(map(str, marks.plan_levels))
    return f"expected a level that plans may use ({levels})"


def _text(marks: Marks) -> str:
    tcp, rdma, usable = (
        ",".join(map(str, values)) or "none" for values in (marks.tcp, marks.rdma, marks.usable)
    )
    return f"tcp {tcp}, rdma {rdma}, of which levels {usable} may be used"
