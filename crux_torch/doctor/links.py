"""Whether jobs that share a PCIe link of this host can give way to each other there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from crux_torch.apply.links import FOLDER
from crux_torch.doctor.check import Check
from crux_torch.fabric.pcie import PcieTree
from crux_torch.settings import Settings

PART = "host links"
COST = "jobs of lower levels do not give way on this host's PCIe links"


def semaphores(settings: Settings) -> Iterator[Check]:
    """Whether a place on a link can be taken, and which links ``CRUX_LINKS`` means here."""
    if settings.links == "none":
        yield Check(PART, "missing", "switched off: CRUX_LINKS=none", COST, "unset CRUX_LINKS")
        return
    try:
        # The extension needs its libraries.
        import_module("torch")
        gate = import_module("crux_torch._C").link_gate()
        try:
            gate.join(str(FOLDER), settings.cluster, "doctor", "doctor")
        finally:
            gate.retire()
    except ImportError as error:
        yield Check(PART, "missing", f"no extension: {error}", COST, "see extension")
        return
    except RuntimeError as error:
        remedy = f"a {FOLDER} that this user can write to; remove files there that are not its own"
        yield Check(PART, "missing", str(error), COST, remedy)
        return
    if settings.links != "auto":
        yield Check(PART, "ok", f"stand-in links {settings.links}")
        return
    tree = PcieTree.read()
    if tree.obstacle is not None:
        remedy = "on a virtual machine ask for the host's PCIe topology; on CPUs set CRUX_LINKS"
        yield Check(PART, "missing", tree.obstacle, COST, remedy)
    else:
        yield Check(PART, "ok", f"{len(tree.links())} PCIe links above GPUs and NICs")
