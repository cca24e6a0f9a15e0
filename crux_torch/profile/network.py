"""What the network reports of a job's iteration, beside what is computed from its collectives.

The bytes of an iteration follow from the collectives and their algorithms, and t from those and the
topology. Where NCCL's profiler plugin counts what is handed to the network, both can be checked:
an algorithm that differs, ranks placed otherwise than assumed, or a topology that is not the real
one shows as a ratio far from one. Nothing is corrected by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from crux_torch.profile.job_profile import NonNegative

if TYPE_CHECKING:
    from crux_torch.profile.sample import RankSample

#: Measured over computed outside these bounds is worth a warning. NCCL's LL protocol sends each
#: byte with one of flags, which counts as sent; it is for messages too small to matter in a sum.
RATIO_BOUNDS = (0.5, 2.0)


class NetworkRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank's process handed to the network in an iteration, all its groups together.

    Attributes:
        sent_bytes: mean bytes of an iteration.
        sending_s: mean seconds of an iteration with at least one transfer in the network's hands.
        untracked: transfers of the whole measurement that are in neither.
    """

    sent_bytes: NonNegative
    sending_s: NonNegative
    untracked: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


@dataclass(frozen=True, slots=True)
class NetworkTotal:
    """What the job handed to the network in an iteration.

    Attributes:
        sent_bytes: of all its ranks.
        sending_s: of the rank that took longest.
    """

    sent_bytes: float
    sending_s: float


def total(samples: Sequence[RankSample]) -> NetworkTotal | None:
    """The whole job's, scaled to its world size where ranks are missing.

    None where a rank tells nothing, or could not follow all of its transfers: then a part is known,
    and a part of no known size.
    """
    rows = [sample.network for sample in samples]
    if not rows:
        return None
    known = [row for row in rows if row is not None and not row.untracked]
    if len(known) < len(rows):
        return None
    scale = samples[0].world_size / len(rows)
    return NetworkTotal(
        sent_bytes=scale * sum(row.sent_bytes for row in known),
        sending_s=max(row.sending_s for row in known),
    )


def disagreements(
    measured: NetworkTotal, *, computed_bytes: float, computed_s: float | None
) -> Iterator[str]:
    """What is said of a job whose measured and computed figures are too far apart.

    Args:
        measured: what the network reported.
        computed_bytes: between hosts in an iteration, from the collectives.
        computed_s: t, where it was computed from a topology.
    """
    if _apart(measured.sent_bytes, computed_bytes):
        yield (
            f"NCCL sent {measured.sent_bytes:.3g} bytes in an iteration, and its collectives make "
            f"{computed_bytes:.3g} between hosts: are the ranks where they are thought to be?"
        )
    if computed_s is not None and _apart(measured.sending_s, computed_s):
        yield (
            f"NCCL's sends took {measured.sending_s:.3g} s of an iteration, and the topology says "
            f"{computed_s:.3g} s: is it right?"
        )


def _apart(measured: float, computed: float) -> bool:
    if measured <= 0 and computed <= 0:
        return False
    low, high = RATIO_BOUNDS
    return not low * computed <= measured <= high * computed
