"""Results of ``crux qos check`` on this host, kept for ``crux doctor`` until the host restarts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from crux_torch.errors import CruxError
from crux_torch.files import read_file, write_file
from crux_torch.network.probe.qos_probe import QosReport
from crux_torch.own_folders import usable_folder

FILE = "qos.json"
#: Peers whose last result is kept, and bytes that the file may have.
PEERS = 64
LIMIT_BYTES = 1 << 20


def remember(report: QosReport, folder: Path | None = None) -> None:
    """Keep ``report`` as the last one about the way to its destination.

    Raises:
        OSError: this user's folder can't be written to.
    """
    folder = usable_folder() if folder is None else folder
    others = (one for one in recall(folder) if one.destination != report.destination)
    kept = (report, *others)[:PEERS]
    write_file(folder / FILE, msgspec.json.encode(kept))


def recall(folder: Path | None = None) -> tuple[QosReport, ...]:
    """Returns the last result about each destination, the newest first; none if unreadable."""
    with contextlib.suppress(OSError, CruxError, msgspec.MsgspecError, RecursionError):
        folder = usable_folder() if folder is None else folder
        raw = read_file(folder / FILE, LIMIT_BYTES)
        found = msgspec.json.decode(raw, type=tuple[QosReport, ...])
        return tuple(sorted(found, key=lambda report: -report.at))
    return ()
