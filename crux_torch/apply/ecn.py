"""The two ECN bits of the class that Crux gives to queue pairs (RFC 3168, RoCEv2).

On a cluster that runs DCQCN the class has to say ECT, like ``NCCL_IB_TC=106`` (DSCP 26 and
ECT(0)), so that switches mark packets instead of dropping them. If the devices don't run DCQCN, the
bits must stay 0, because the senders would not react to marks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crux_torch.host.rdma import RdmaDevice, RdmaPort, read_devices
from crux_torch.host.sysfs import SYSFS, entries, text
from crux_torch.settings import Settings

ECT0 = 2
MASK = 3
#: RDMA-CM's default class, one file for each port; readable by root.
CONFIGFS = Path("/sys/kernel/config/rdma_cm")


@dataclass(frozen=True, slots=True)
class Ecn:
    """The ECN bits to use (0, 1 or 2), and where they come from, as text for the user."""

    bits: int
    why: str


def choose(
    setting: str,
    devices: Sequence[RdmaDevice],
    sysfs: Path = SYSFS,
    configfs: Path = CONFIGFS,
) -> Ecn:
    """The ECN bits for this host's queue pairs: ``setting``, unless it is ``auto``.

    With ``auto``, the first of these that an active RoCE port has: the bits of the class that
    NVIDIA's driver forces (``tc/PORT/traffic_class``); those of RDMA-CM's default class; ECT(0) if
    the port reacts to congestion notifications (``ecn/roce_rp/enable``). 0 if none has one, or if
    an InfiniBand port is active.
    """
    ports = [(device, port) for device in devices for port in device.ports if port.active]
    if any(port.link_layer == "InfiniBand" for _, port in ports):
        return Ecn(0, "InfiniBand has no ECN bits, and NCCL takes the service level from them")
    if setting != "auto":
        return Ecn(int(setting), "CRUX_ROCE_ECN")
    for device, port in ports:
        found = _of_port(device, port, sysfs, configfs)
        if found is not None:
            return found
    return Ecn(0, "no RoCE port is known to be configured for ECN")


@functools.cache
def of_this_process() -> Ecn:
    """The choice for this process's settings and host, looked up once."""
    return choose(Settings.from_env().roce_ecn, read_devices())


def _of_port(device: RdmaDevice, port: RdmaPort, sysfs: Path, configfs: Path) -> Ecn | None:
    of_device = sysfs / "class/infiniband" / device.name
    forced = of_device / "tc" / str(port.number) / "traffic_class"
    by_default = configfs / device.name / "ports" / str(port.number) / "default_roce_tos"
    for file in (forced, by_default):
        traffic_class = class_in(file)
        # Only switches write 3.
        if traffic_class is not None and traffic_class & MASK in (1, ECT0):
            return Ecn(traffic_class & MASK, f"{file} is {traffic_class}")
    if port.interface is not None:
        enabled = sysfs / "class/net" / port.interface / "ecn/roce_rp/enable"
        if any(text(priority).strip() == "1" for priority in entries(enabled)):
            return Ecn(ECT0, f"{port.interface} reacts to congestion notifications (DCQCN)")
    return None


def class_in(file: Path) -> int | None:
    """The class in an attribute of the driver (``106`` or ``Global tclass=106``), or None."""
    number = text(file).partition("\n")[0].rpartition("=")[2].strip()
    return int(number) if number.isdecimal() and int(number) <= 255 else None
