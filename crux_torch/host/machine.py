"""This host: its GPUs, CPU and NICs. What is missing is None or empty, never an error."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from crux_torch.host.nic import Nic, read_nics
from crux_torch.host.nvml import Gpu, bounded, read_gpus
from crux_torch.host.sysfs import SYSFS, number, text

CPUINFO = Path("/proc/cpuinfo")
_FIELD = re.compile(r"^[ \t]*(.*?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
#: Single-precision FLOPs of one core in one cycle by instruction set, widest first: lanes x 2 (a
#: multiply-add is two FLOPs) x 2 units, the most that such a core has (Intel 64 and IA-32
#: optimization manual; Arm Neoverse guides). AMX counts its bfloat16 tiles: 16 x 16 x 32
#: multiply-adds in 16 cycles.
SIMD_FLOPS_PER_CYCLE = (
    (("amx_bf16",), 1024),
    (("avx512f",), 64),
    (("avx2", "fma"), 32),
    (("avx",), 16),
    (("sve",), 64),
    (("asimd",), 32),
    (("sse2",), 8),
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processors of this host, and the most that they could compute.

    Attributes:
        cores: physical cores, or hardware threads if the kernel doesn't list cores.
        frequency_Hz: highest known clock; None if no source tells.
        flops_per_cycle: FLOPs of one core in one cycle, by its widest instructions.
    """

    model: str
    cores: int
    frequency_Hz: float | None
    flops_per_cycle: int | None

    @property
    def peak_flops(self) -> float | None:
        """An upper bound in FLOP/s, for bounding what a job on CPUs may claim."""
        if self.frequency_Hz is None or self.flops_per_cycle is None:
            return None
        return self.cores * self.frequency_Hz * self.flops_per_cycle


@dataclass(frozen=True, slots=True)
class Host:
    """The hardware of one host."""

    name: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu | None
    nics: tuple[Nic, ...]


def this_host() -> Host:
    """This host, as far as this process can see it."""
    return Host(socket.gethostname(), bounded(read_gpus) or (), read_cpu(), read_nics())


def read_cpu(cpuinfo: Path = CPUINFO, sysfs: Path = SYSFS) -> Cpu | None:
    """The processors in ``cpuinfo``; None if it can't be read or lists none."""
    parts = [_FIELD.findall(part) for part in text(cpuinfo).split("\n\n")]
    processors = [p for p in map(dict, parts) if "processor" in p]
    if not processors:
        return None
    places = ((p.get("physical id"), p.get("core id")) for p in processors)
    cores = {place for place in places if None not in place}
    flags = set((processors[0].get("flags") or processors[0].get("Features") or "").split())
    per_cycle = (flops for needed, flops in SIMD_FLOPS_PER_CYCLE if flags.issuperset(needed))
    return Cpu(
        model=processors[0].get("model name", ""),
        cores=len(cores) or len(processors),
        frequency_Hz=_frequency_Hz(processors, sysfs),
        flops_per_cycle=next(per_cycle, None),
    )


def _frequency_Hz(processors: list[dict[str, str]], sysfs: Path) -> float | None:
    """The highest of the limit in sysfs, the nominal clock in the name, and the clocks now."""
    limit = text(sysfs / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    nominal = re.search(r"@ *([0-9.]+) *GHz", processors[0].get("model name", ""))
    figures = [(limit, 1e3), (nominal[1] if nominal else "", 1e9)]
    figures += [(p.get("cpu MHz", ""), 1e6) for p in processors]
    return max((number(figure) or 0.0) * unit_Hz for figure, unit_Hz in figures) or None
