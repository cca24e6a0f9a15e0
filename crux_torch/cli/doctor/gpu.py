"""GPUs: the driver, the PCIe tree, NICs beside GPUs, and the host's semaphores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.errors import SettingsError
from crux_torch.host import nvml
from crux_torch.host.interfaces import Nic, read_nics
from crux_torch.host.machine import usable_nics
from crux_torch.host.nvml import NvmlReport
from crux_torch.host.pcie import Distance, PcieTree, redirecting_ports
from crux_torch.own_folders import group_id, usable_folder
from crux_torch.settings import Settings


def gpus(
    settings: Settings,
    report: NvmlReport | None = None,
    tree: PcieTree | None = None,
    nics: Sequence[Nic] | None = None,
    acs: Callable[..., tuple[str, ...] | None] = redirecting_ports,
) -> Iterator[Check]:
    """Makes all checks of this host's GPUs, its PCIe tree, and the NICs near the GPUs."""
    report = report or nvml.bounded_report()
    tree = tree or PcieTree.read()
    yield driver(report)
    yield from pcie(tree, acs)
    if not report.gpus:
        return
    yield from rates(report, settings)
    yield gpm(report)
    yield from peers(report, tree)
    yield from affinity(report, tree, read_nics() if nics is None else nics)


def driver(report: NvmlReport) -> Check:
    """Checks that NVML answers, and lists GPUs."""
    part = Part("NVIDIA driver", "GPU activity, NVLink and the GPU's place in the host are unknown")
    if report.gpus:
        names = [gpu.name for gpu in report.gpus]
        listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return part.ok(f"{report.driver or 'release unknown'}: {listed}")
    remedy = (
        "nothing if there is no GPU; else install the driver (in a container, set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )
    return part.missing(report.error or "NVML lists no GPU", remedy)


def rates(report: NvmlReport, settings: Settings) -> Iterator[Check]:
    """Checks that the peak rate of each GPU is known, and that MIG does not split it."""
    cost = "W comes from counted FLOPs only, and a job's claim is bounded loosely"
    part = Part("GPU's peak rate", cost)
    unknown = sorted({gpu.name for gpu in report.gpus if gpu.peak_flops is None})
    if settings.device_flops:
        yield part.ok(f"CRUX_DEVICE_FLOPS={settings.device_flops:g}")
    elif unknown:
        remedy = "set CRUX_DEVICE_FLOPS to the peak FLOP/s of its data sheet"
        yield part.missing(f"not known: {', '.join(unknown)}", remedy)
    else:
        peaks = sorted({f"{gpu.peak_flops:.4g} FLOP/s" for gpu in report.gpus})
        yield part.ok(f"at most {', '.join(peaks)}")
    split = [gpu.index for gpu in report.gpus if gpu.mig]
    if split:
        part = Part("MIG", "the bound is that of the whole GPU, and activity is not measured")
        remedy = "set CRUX_DEVICE_FLOPS to an instance's share"
        yield part.missing(f"GPUs {_numbers(split)} are split into MIG instances", remedy)


def gpm(report: NvmlReport) -> Check:
    """Checks that hardware counters (GPM) can check the counted FLOPs."""
    part = Part("GPM counters", "counted FLOPs are only checked against polled utilization")
    without = [gpu.index for gpu in report.gpus if not gpu.gpm]
    if not without:
        return part.ok("activity of SMs and tensor cores is measured")
    remedy = "use Hopper or newer, driver 525 or newer, without MIG"
    return part.missing(f"not on GPUs {_numbers(without)}", remedy)


def peers(report: NvmlReport, tree: PcieTree) -> Iterator[Check]:
    """Checks NVLink and peer access, and that NVML and sysfs agree on the distances of GPUs."""
    if len(report.gpus) < 2:
        return
    part = Part("NVLink", "traffic between GPUs crosses PCIe and competes with that of the NICs")
    without = [gpu.index for gpu in report.gpus if not gpu.nvlinks]
    if not without:
        counts = sorted({sum(link.count for link in gpu.nvlinks) for gpu in report.gpus})
        yield part.ok(f"{'/'.join(map(str, counts))} links a GPU")
    else:
        yield part.missing(
            f"none on GPUs {_numbers(without)}",
            "nothing if the machine has no NVLink; else see nvidia-smi nvlink, "
            "nvidia-fabricmanager",
        )
    part = Part("peer access", "NCCL copies between these GPUs through host memory")
    refused = [p.peer_access for p in report.pairs if p.peer_access not in ("ok", None)]
    if refused:
        reasons = ", ".join(sorted(set(map(str, refused))))
        yield part.missing(
            f"{len(refused)} of {len(report.pairs)} pairs have none: {reasons}",
            "set the IOMMU to off or passthrough, ACS to off; consumer GPUs have no peer access",
        )
    elif any(p.peer_access == "ok" for p in report.pairs):
        yield part.ok("every GPU can access every other GPU's memory")
    yield from _agreement(report, tree)


def _agreement(report: NvmlReport, tree: PcieTree) -> Iterator[Check]:
    part = Part("GPU topology", "traffic may be attributed to the wrong PCIe links")
    address = {gpu.index: gpu.pci_address for gpu in report.gpus}
    differ = []
    for pair in report.pairs:
        a, b = address[pair.a], address[pair.b]
        if pair.distance is None or a not in tree.devices or b not in tree.devices:
            continue
        seen = tree.distance(a, b)
        # They do not agree on what one host bridge is, so PHB and NODE count as one.
        same = seen == pair.distance or {seen, pair.distance} == {Distance.PHB, Distance.NODE}
        if not same:
            differ.append(f"{pair.a}-{pair.b}: {pair.distance.name} and {seen.name}")
    if differ:
        found = f"NVML and sysfs differ for {len(differ)} pairs ({differ[0]})"
        remedy = "in a virtual machine: describe the real host in the topology file"
        yield part.missing(found, remedy)
    elif report.pairs:
        yield part.ok("NVML and sysfs agree")


def pcie(tree: PcieTree, acs: Callable[..., tuple[str, ...] | None]) -> Iterator[Check]:
    """Checks that the PCIe tree is visible, links run at full speed, and ACS redirects nothing."""
    part = Part("PCIe tree", "Crux does not know which jobs share a PCIe link of this host")
    if tree.obstacle:
        remedy = "add the real host to the topology file (crux host --yaml on bare metal)"
        yield part.missing(tree.obstacle, remedy)
        return
    ends = tree.of_kind("gpu", "nic")
    yield part.ok(f"{len(tree.links())} links above {len(ends)} GPUs and NICs")
    part = Part("PCIe link", "traffic over this link is slower than the hardware allows")
    idle = {link.name for end in tree.of_kind("gpu") for link in tree.links_above(end)[:1]}
    for link in tree.links():
        if link.narrow or (link.slow and link.name not in idle):
            found = f"link to {link.address} runs at {link.current}; both ends support {link.most}"
            remedy = "reseat the card or its riser; check the slot's setting in the firmware"
            yield part.missing(found, remedy)
    if not tree.of_kind("gpu"):
        return
    redirecting = acs(tree, ends)
    if redirecting is None:
        part = Part("PCIe ACS", "it is unknown whether peer traffic goes through the CPU")
        yield part.missing("only root can read it", "run crux doctor as root")
    elif redirecting:
        part = Part("PCIe ACS", "traffic between a GPU and its NIC goes through the CPU")
        remedy = "turn ACS off in the firmware or by setpci, unless virtual machines need it"
        yield part.missing(f"redirects peer traffic at {', '.join(redirecting)}", remedy)
    else:
        yield Check("PCIe ACS", "ok", "peer traffic stays within the PCIe switches")


def affinity(report: NvmlReport, tree: PcieTree, nics: Sequence[Nic]) -> Iterator[Check]:
    """Checks that each GPU has a NIC on its own PCIe switch."""
    part = Part("NICs beside GPUs", "the network traffic of these GPUs goes through the CPU")
    nics = usable_nics(nics, tree)
    if not nics or tree.obstacle:
        return
    far = []
    for gpu in report.gpus:
        nic = tree.nic_of(gpu.pci_address, nics)
        distance = tree.distance(gpu.pci_address, nic.pci_address or "") if nic else Distance.LOC
        if nic and distance > Distance.PXB:
            far.append(f"GPU {gpu.index} is {distance.name} from {nic.name}")
    if far:
        remedy = "move the NIC to a slot on the GPU's switch, if the machine has one"
        yield part.missing("; ".join(far), remedy)
    else:
        yield part.ok("every GPU has a NIC on its own PCIe switch")


def _numbers(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


PART = Part(
    "host links", "jobs of lower levels do not give way to others on this host's PCIe links"
)


def semaphores(settings: Settings) -> Check:
    """Checks that the semaphores work, and the links that ``CRUX_LINKS`` names here."""
    if settings.links == ("none",):
        remedy = "set CRUX_LINKS=auto if jobs here meet on PCIe links (docs/understand/host.md)"
        return PART.missing("switched off: CRUX_LINKS=none", remedy)
    try:
        # The extension needs its libraries.
        import_module("torch")
        gate = import_module("crux_torch._C").link_gate()
        try:
            folder = usable_folder(group_id(settings.store_group))
            gate.join(str(folder), settings.cluster, "doctor", "doctor")
        finally:
            gate.retire()
    except ImportError as error:
        return PART.missing(f"no extension: {error}", "see the check `extension`")
    except (OSError, RuntimeError, SettingsError) as error:
        remedy = "have others' files removed from its folder (docs/understand/host.md)"
        return PART.missing(str(error), remedy)
    if settings.links != ("auto",):
        return PART.ok(f"named links {', '.join(settings.links)}")
    tree = PcieTree.read()
    if tree.obstacle is not None:
        remedy = "nothing on hosts without GPUs; in a virtual machine, name the links in CRUX_LINKS"
        return PART.missing(tree.obstacle, remedy)
    return PART.ok(f"{len(tree.links())} PCIe links above GPUs and NICs")
