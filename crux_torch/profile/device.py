"""The device that a rank computes on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crux_torch.profile.activity import DeviceActivity
from crux_torch.profile.job_profile import Name, NonNegative


class DeviceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's device, and what its work asks of it.

    Attributes:
        name: model, as the driver reports it.
        gpu: its number among the host's GPUs in the order of their PCI addresses, where known.
        flops: FLOP/s that it could do in the data types in use; 0 where that is not known.
        peak_flops: FLOP/s that it could do in its fastest data type; bounds what the rank may
            claim; 0 where it is not known.
        tensor_s: seconds of an iteration that the counted FLOPs take tensor cores at their peak;
            None where none were counted or the peak is not known.
        activity: how busy it was while it was measured; None where it does not tell.
    """

    name: Name
    gpu: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] | None = None
    flops: NonNegative = 0.0
    peak_flops: NonNegative = 0.0
    tensor_s: NonNegative | None = None
    activity: DeviceActivity | None = None
