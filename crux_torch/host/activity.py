"""How busy a GPU was over a measurement."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]


class DeviceActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means over a measurement. A field is None if the device does not report it.

    Attributes:
        source: ``gpm``: hardware counters over the whole time; ``utilization``: polled rates.
        busy: with ``gpm`` the mean share of SMs that were busy, with ``utilization`` the share of
            time in which any kernel ran. Both count a collective's kernels while they wait.
        tensor: share of time in which the SMs' tensor cores worked.
        pcie_sent_Bps, pcie_received_Bps: seen from the device.
        nvlink_sent_Bps, nvlink_received_Bps: over all its NVLinks.
    """

    source: Literal["gpm", "utilization"]
    busy: Share | None = None
    tensor: Share | None = None
    pcie_sent_Bps: Rate | None = None
    pcie_received_Bps: Rate | None = None
    nvlink_sent_Bps: Rate | None = None
    nvlink_received_Bps: Rate | None = None
