"""Records of programs under ``crux exec``, which writes them from a process that stays small."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import msgspec

from crux_torch.agreement import SCHEMA_VERSION, Level
from crux_torch.measure.profile import Name
from crux_torch.store import APART


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A program under ``crux exec``, for status commands. No plan follows from it.

    Attributes:
        name, level: as the operator's settings allow them.
        pid, user: of its first process, as its host has them.
        dscp, qp_dscp: of its TCP connections and of its queue pairs; absent if they are left alone.
        through: switch that its TCP connections cross; empty if the network decides.
    """

    version: int = SCHEMA_VERSION
    name: Name
    host: Name
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    user: Name
    level: Level
    dscp: Level | None = None
    qp_dscp: Level | None = None
    through: Annotated[str, msgspec.Meta(max_length=256)] = ""


def programs_prefix(cluster: str) -> str:
    """Returns what the keys of the programs of ``cluster`` begin with."""
    return f"{APART}{quote(cluster, safe='')}/programs/"
