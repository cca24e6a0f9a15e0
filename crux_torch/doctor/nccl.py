"""NCCL: who decides the class of its queue pairs, and whether its use of the network is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from crux_torch.apply import ecn, nccl, nccl_profiler
from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.doctor.check import Check
from crux_torch.fabric.rdma import RdmaDevice, read_devices
from crux_torch.fabric.sysfs import SYSFS
from crux_torch.settings import Settings

Devices = Callable[[], tuple[RdmaDevice, ...]]
ENV_PLUGIN = "NCCL_ENV_PLUGIN"
ECN_NAMES = ("not ECN capable", "ECT(1)", "ECT(0)", "CE")


def traffic_class(env: Mapping[str, str], settings: Settings) -> Iterator[Check]:
    """Whether the class of NCCL's queue pairs is Crux's to give."""
    part = "NCCL's traffic class"
    if not settings.nccl_class:
        found, cost = "switched off: CRUX_NCCL_CLASS=0", "NCCL's queue pairs have NCCL's class"
        yield Check(part, "missing", found, cost, "unset CRUX_NCCL_CLASS")
        return
    beaten = nccl.overrides(env)
    for override in beaten:
        where = "" if override.source == ENVIRONMENT else f" in {override.source}"
        yield Check(part, "missing", str(override), override.what, f"unset {override.name}{where}")
    plugin = NcclVariables(env).get(ENV_PLUGIN)
    if plugin is not None and plugin.text != "none":
        cost = "what that plugin says of NCCL_IB_TC and the like wins, and is not seen here"
        yield Check(part, "missing", f"{ENV_PLUGIN}={plugin.text}", cost, f"unset {ENV_PLUGIN}")
    elif not beaten:
        yield Check(part, "ok", "given to each communicator when it is made")


def forced_classes(devices: Devices = read_devices, sysfs: Path = SYSFS) -> Iterator[Check]:
    """Whether a driver puts a class of its own in place of every queue pair's."""
    for device in devices():
        for port in device.ports:
            file = sysfs / "class/infiniband" / device.name / f"tc/{port.number}/traffic_class"
            forced = ecn.class_in(file)
            if forced:
                cost = "all queue pairs of that port leave with it, whatever level their job has"
                yield Check(device.name, "missing", f"{file} is {forced}", cost, f"echo 0 > {file}")


def ecn_bits(
    env: Mapping[str, str],
    settings: Settings,
    devices: Devices = read_devices,
    sysfs: Path = SYSFS,
    configfs: Path = ecn.CONFIGFS,
) -> Iterator[Check]:
    """What queue pairs say of ECN, on hosts with RoCE, and whether the operator said otherwise."""
    part = "ECN of queue pairs"
    present = devices()
    if not any(port.active for device in present for port in device.ports):
        return
    chosen = ecn.choose(settings.roce_ecn, present, sysfs, configfs)
    found = f"{ECN_NAMES[chosen.bits]}: {chosen.why}"
    operators = NcclVariables(env).integer("NCCL_IB_TC")
    said = chosen.bits if operators is None else operators & ecn.MASK
    if said == chosen.bits or said == ecn.MASK:
        yield Check(part, "ok", found)
        return
    cost = (
        f"NCCL_IB_TC={operators} says {ECN_NAMES[said]}: where Crux gives the class instead, DCQCN "
        "would be told otherwise"
    )
    yield Check(part, "missing", found, cost, f"set CRUX_ROCE_ECN={said}")


def profiler(env: Mapping[str, str], settings: Settings) -> Iterator[Check]:
    """Whether NCCL will load the profiler plugin, where it is asked for."""
    if not settings.nccl_profiler:
        return
    part = "NCCL profiler plugin"
    found = nccl_profiler.obstacle(env)
    if found is None:
        yield Check(part, "ok", "cruxrun names it, and NCCL loads it with its first communicator")
    else:
        cost = "what NCCL moves over the network is not measured, and t not checked by it"
        yield Check(part, "missing", found, cost, "let it be the one plugin, or do without")
