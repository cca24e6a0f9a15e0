"""How busy a device was while it was measured."""

from __future__ import annotations

from typing import Literal

import msgspec

from crux_torch.profile.job_profile import NonNegative, Share


class DeviceActivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Means over a measurement; None where the device does not tell.

    Attributes:
        source: ``gpm`` (hardware counters of the whole time) or ``utilization`` (polled).
        busy: with ``gpm`` the mean share of multiprocessors at work, else the share of time in
            which any kernel ran; both include a collective's own kernels while they wait.
        tensor: share of time in which the multiprocessors' tensor cores worked.
        pcie_sent_Bps, pcie_received_Bps: from the device's view.
        nvlink_sent_Bps, nvlink_received_Bps: over all its links.
    """

    source: Literal["gpm", "utilization"]
    busy: Share | None = None
    tensor: Share | None = None
    pcie_sent_Bps: NonNegative | None = None
    pcie_received_Bps: NonNegative | None = None
    nvlink_sent_Bps: NonNegative | None = None
    nvlink_received_Bps: NonNegative | None = None
