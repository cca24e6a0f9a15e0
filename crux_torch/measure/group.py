"""A process group as the recorder's table lists it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One process group of this rank; a record's ``group`` is its index in the table.

    Attributes:
        name: the group's name in c10d, the same on all its ranks.
        ranks: global ranks in the order of their group ranks.
        my_rank: this process's rank within the group.
    """

    name: str
    ranks: tuple[int, ...]
    my_rank: int
