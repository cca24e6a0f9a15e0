"""NCCL: who sets the traffic class of its queue pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from crux_torch.apply import ecn, nccl
from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.doctor.check import Check, Part
from crux_torch.host.rdma import RdmaDevice
from crux_torch.host.sysfs import SYSFS
from crux_torch.settings import Settings

ENV_PLUGIN = "NCCL_ENV_PLUGIN"
ECN_NAMES = ("not ECN capable", "ECT(1)", "ECT(0)", "CE")


def traffic_class(env: Mapping[str, str], settings: Settings) -> Iterator[Check]:
    """Whether Crux can set the traffic class of NCCL's queue pairs."""
    name = "NCCL's traffic class"
    if not settings.nccl_class:
        part = Part(name, "NCCL's queue pairs have no priority")
        yield part.missing("switched off: CRUX_NCCL_CLASS=0", "unset CRUX_NCCL_CLASS")
        return
    beaten = nccl.overrides(env)
    for override in beaten:
        where = "" if override.source == ENVIRONMENT else f" in {override.source}"
        part = Part(name, override.what)
        yield part.missing(str(override), f"unset {override.name}{where}")
    plugin = NcclVariables(env).get(ENV_PLUGIN)
    if plugin is not None and plugin.text != "none":
        cost = "that plugin may override NCCL_IB_TC and others; Crux can't see its values"
        yield Part(name, cost).missing(f"{ENV_PLUGIN}={plugin.text}", f"unset {ENV_PLUGIN}")
    elif not beaten:
        yield Check(name, "ok", "Crux sets it when a communicator is made")


def unreached(env: Mapping[str, str]) -> Iterator[Check]:
    """What takes traffic out of Crux's reach."""
    for name, cost in nccl.unreached(env).items():
        yield Part(name, cost).missing("set", f"unset {name}")


def forced_classes(devices: Sequence[RdmaDevice], sysfs: Path = SYSFS) -> Iterator[Check]:
    """Whether a driver overrides the class of every queue pair."""
    for device in devices:
        for port in device.ports:
            file = sysfs / "class/infiniband" / device.name / f"tc/{port.number}/traffic_class"
            forced = ecn.class_in(file)
            if forced:
                cost = "all queue pairs of that port have this class, so priorities have no effect"
                yield Check(device.name, "missing", f"{file} is {forced}", cost, f"echo 0 > {file}")


def ecn_bits(
    env: Mapping[str, str],
    settings: Settings,
    devices: Sequence[RdmaDevice],
    sysfs: Path = SYSFS,
    configfs: Path = ecn.CONFIGFS,
) -> Iterator[Check]:
    """Which ECN bits queue pairs get on RoCE, and whether NCCL_IB_TC contradicts them."""
    part = "ECN of queue pairs"
    if not any(port.active for device in devices for port in device.ports):
        return
    chosen = ecn.choose(settings.roce_ecn, devices, sysfs, configfs)
    found = f"{ECN_NAMES[chosen.bits]}: {chosen.why}"
    operators = NcclVariables(env).integer("NCCL_IB_TC")
    said = chosen.bits if operators is None else operators & ecn.MASK
    if said == chosen.bits or said == ecn.MASK:
        yield Check(part, "ok", found)
        return
    cost = (
        f"NCCL_IB_TC={operators} means {ECN_NAMES[said]}; the class that Crux sets instead would "
        "change how DCQCN treats these packets"
    )
    yield Check(part, "missing", found, cost, f"set CRUX_ROCE_ECN={said}")
