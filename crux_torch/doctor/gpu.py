"""GPUs: the driver, what NVML tells, how GPUs and NICs are joined, and NCCL's own choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.doctor.check import Check
from crux_torch.fabric import nvml
from crux_torch.fabric.host import Host, read_nics
from crux_torch.fabric.host_topology import usable_nics
from crux_torch.fabric.nvml import NvmlReport
from crux_torch.fabric.pcie import Distance, PcieTree
from crux_torch.fabric.pcie_acs import redirecting_ports
from crux_torch.settings import Settings

#: Variables by which a user takes NCCL's view of the host or its choice of NICs out of its hands.
NCCL_CHOICES = {
    "NCCL_TOPO_FILE": "NCCL reads the host's tree from this file",
    "NCCL_IB_HCA": "NCCL uses these RDMA devices only",
    "NCCL_SOCKET_IFNAME": "NCCL uses these interfaces only",
    "NCCL_NET": "NCCL sends by this network only",
    "NCCL_IB_DISABLE": "NCCL uses no RDMA device",
    "NCCL_NET_MERGE_LEVEL": "NCCL joins NICs up to this distance into one",
    "NCCL_NET_FORCE_MERGE": "NCCL joins these NICs into one",
    "NCCL_CROSS_NIC": "NCCL may enter a host by another NIC than it left the last one by",
    "NCCL_NET_GDR_LEVEL": "NCCL decides by this distance whether a NIC reads the GPU's memory",
    "NCCL_P2P_DISABLE": "NCCL sends no peer traffic over PCIe or NVLink",
    "NCCL_P2P_LEVEL": "NCCL sends peer traffic over PCIe up to this distance",
}


def gpus(
    settings: Settings,
    report: NvmlReport | None = None,
    tree: PcieTree | None = None,
    host: Host | None = None,
    acs: Callable[..., tuple[str, ...] | None] = redirecting_ports,
) -> Iterator[Check]:
    """What there is to say of this host's GPUs, its PCIe tree and its NICs beside them."""
    report = report or nvml.bounded_report()
    tree = tree or PcieTree.read()
    host = host or Host("", report.gpus, None, read_nics())
    yield driver(report)
    yield from pcie(tree, acs)
    if not report.gpus:
        return
    yield from rates(report, settings)
    yield gpm(report)
    yield from peers(report, tree)
    yield from affinity(report, tree, host)


def driver(report: NvmlReport) -> Check:
    """Whether NVML answers, and which GPUs it lists."""
    part = "NVIDIA driver"
    if report.gpus:
        names = [gpu.name for gpu in report.gpus]
        listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Check(part, "ok", f"{report.driver or 'release unknown'}: {listed}")
    found = report.error or "NVML lists no GPU"
    cost = "no GPU to measure: activity, NVLink and the GPU's place in the host stay unknown"
    remedy = "none needed without GPUs; else the driver, in containers with its utility libraries"
    return Check(part, "missing", found, cost, remedy)


def rates(report: NvmlReport, settings: Settings) -> Iterator[Check]:
    """Whether the devices' peak rates are known, and whether they are whole."""
    part = "GPU's peak rate"
    unknown = sorted({gpu.name for gpu in report.gpus if gpu.peak_flops is None})
    if settings.device_flops:
        yield Check(part, "ok", f"CRUX_DEVICE_FLOPS={settings.device_flops:g}")
    elif unknown:
        cost = "W comes from counted FLOPs only, and claims are bounded loosely"
        remedy = "set CRUX_DEVICE_FLOPS to the figure of its data sheet"
        yield Check(part, "missing", f"not known: {', '.join(unknown)}", cost, remedy)
    else:
        peaks = sorted({f"{gpu.peak_flops:.4g} FLOP/s" for gpu in report.gpus})
        yield Check(part, "ok", f"at most {', '.join(peaks)}")
    split = [gpu.index for gpu in report.gpus if gpu.mig]
    if split:
        found = f"GPUs {_numbers(split)} are split into instances"
        cost = "bounds are those of the whole GPU, and nobody tells an instance's activity"
        remedy = "set CRUX_DEVICE_FLOPS to an instance's share"
        yield Check("MIG", "missing", found, cost, remedy)


def gpm(report: NvmlReport) -> Check:
    """Whether hardware counters can check counted FLOPs."""
    without = [gpu.index for gpu in report.gpus if not gpu.gpm]
    if not without:
        return Check("GPM counters", "ok", "tensor cores and SMs are watched while measuring")
    cost = "counted FLOPs are checked against the polled utilisation only"
    remedy = "Hopper or newer with driver 525 or newer, not split by MIG"
    return Check("GPM counters", "missing", f"not on GPUs {_numbers(without)}", cost, remedy)


def peers(report: NvmlReport, tree: PcieTree) -> Iterator[Check]:
    """How GPUs reach each other, and whether NVML and sysfs agree on that."""
    if len(report.gpus) < 2:
        return
    linked = [gpu for gpu in report.gpus if gpu.nvlinks]
    if len(linked) == len(report.gpus):
        counts = sorted({sum(link.count for link in gpu.nvlinks) for gpu in linked})
        yield Check("NVLink", "ok", f"{'/'.join(map(str, counts))} links a GPU")
    else:
        without = [gpu.index for gpu in report.gpus if not gpu.nvlinks]
        cost = "their traffic within the host crosses PCIe, where it meets that of NICs"
        remedy = (
            "none where the machine has no NVLink; else nvidia-fabricmanager, nvidia-smi nvlink"
        )
        yield Check("NVLink", "missing", f"none on GPUs {_numbers(without)}", cost, remedy)
    refused = [p for p in report.pairs if p.peer_access not in ("ok", None)]
    if refused:
        reasons = ", ".join(sorted({str(p.peer_access) for p in refused}))
        found = f"{len(refused)} of {len(report.pairs)} pairs can't: {reasons}"
        cost = "NCCL sends between them through the host's memory"
        remedy = "IOMMU off or in passthrough, ACS off on PCIe switches; consumer GPUs have none"
        yield Check("peer access", "missing", found, cost, remedy)
    elif any(p.peer_access == "ok" for p in report.pairs):
        yield Check("peer access", "ok", "every GPU reaches every other's memory")
    yield from _agreement(report, tree)


def _agreement(report: NvmlReport, tree: PcieTree) -> Iterator[Check]:
    address = {gpu.index: gpu.pci_address for gpu in report.gpus}
    differ = []
    for pair in report.pairs:
        a, b = address[pair.a], address[pair.b]
        if pair.distance is None or a not in tree.devices or b not in tree.devices:
            continue
        seen = tree.distance(a, b)
        if _class(seen) != _class(pair.distance):
            differ.append(f"{pair.a}-{pair.b}: {pair.distance.name} and {seen.name}")
    if differ:
        found = f"NVML and sysfs differ for {len(differ)} pairs ({differ[0]})"
        cost = "traffic may be charged to PCIe links that it does not cross"
        remedy = "in a virtual machine its host's topology; describe it in the topology file"
        yield Check("GPU topology", "missing", found, cost, remedy)
    elif report.pairs:
        yield Check("GPU topology", "ok", "NVML and sysfs agree")


def _class(distance: Distance) -> Distance:
    """NVML and sysfs draw the line between one host bridge and two in different places."""
    return Distance.PHB if distance == Distance.NODE else distance


def pcie(tree: PcieTree, acs: Callable[..., tuple[str, ...] | None]) -> Iterator[Check]:
    """Whether the PCIe tree shows, its links run as they could, and peer traffic may turn in it."""
    part = "PCIe tree"
    if tree.obstacle:
        cost = "jobs that share a PCIe link on this host are not told apart"
        remedy = "the real host's tree in the topology file (crux host --yaml on bare metal)"
        yield Check(part, "missing", tree.obstacle, cost, remedy)
        return
    ends = tree.of_kind("gpu", "nic")
    yield Check(part, "ok", f"{len(tree.links())} links above {len(ends)} GPUs and NICs")
    idle = {link.name for end in tree.of_kind("gpu") for link in tree.links_above(end)[:1]}
    for link in tree.links():
        if link.narrow or (link.slow and link.name not in idle):
            found = f"link to {link.address} runs at {link.current}, both ends can {link.most}"
            cost = "whatever crosses it is slower than the hardware"
            remedy = "reseat the card or its riser; the firmware's setting for that slot"
            yield Check("PCIe link", "missing", found, cost, remedy)
    if not tree.of_kind("gpu"):
        return
    redirecting = acs(tree, ends)
    if redirecting is None:
        cost = "whether peer traffic turns at a PCIe switch or at the CPU is not known"
        yield Check("PCIe ACS", "missing", "needs privileges to be read", cost, "run it as root")
    elif redirecting:
        found = f"redirects peer traffic at {', '.join(redirecting)}"
        cost = "traffic between a GPU and its NIC goes through the CPU"
        remedy = "off in the firmware or by setpci, unless virtual machines need it"
        yield Check("PCIe ACS", "missing", found, cost, remedy)
    else:
        yield Check("PCIe ACS", "ok", "peer traffic turns at the switches")


def affinity(report: NvmlReport, tree: PcieTree, host: Host) -> Iterator[Check]:
    """Whether each GPU has a NIC below its own PCIe root port."""
    part = "NICs beside GPUs"
    nics = usable_nics(host, tree)
    if not nics or tree.obstacle:
        return
    far = []
    for gpu in report.gpus:
        nic = tree.nic_of(gpu.pci_address, nics)
        if nic is not None and nic.pci_address is not None:
            distance = tree.distance(gpu.pci_address, nic.pci_address)
            if distance > Distance.PXB:
                far.append(f"GPU {gpu.index} is {distance.name} from {nic.name}")
    if far:
        cost = "its network traffic goes through the CPU"
        remedy = "none where the machine is built so; else the NIC in a slot of the GPU's switch"
        yield Check(part, "missing", "; ".join(far), cost, remedy)
    else:
        yield Check(part, "ok", "every GPU has one on its own PCIe switch")


def nccl_choices(
    env: Mapping[str, str], version: Callable[[], Any] | None = None
) -> Iterator[Check]:
    """Which NCCL this torch has, and what the environment and NCCL's files decide for it."""
    found = (version or _nccl_version)()
    if not found:
        return
    yield Check("NCCL release", "ok", ".".join(map(str, found)))
    variables = NcclVariables(env)
    for variable, what in NCCL_CHOICES.items():
        chosen = variables.get(variable)
        if chosen is not None:
            where = "" if chosen.source == ENVIRONMENT else f" in {chosen.source}"
            said = f"{variable}={chosen.text}{where}"
            cost = f"{what}: its choice may differ from what `crux host` shows"
            remedy = f"unset {variable}{where}, where it was not meant"
            yield Check("NCCL's choices", "missing", said, cost, remedy)


def _nccl_version() -> tuple[int, ...] | None:
    try:
        import torch

        nccl: Any = torch.cuda.nccl
        return tuple(nccl.version())
    except Exception:
        return None


def _numbers(indices: list[int]) -> str:
    return ", ".join(map(str, indices))
