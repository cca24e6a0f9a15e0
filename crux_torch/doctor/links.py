"""Whether jobs that share a PCIe link of this host can give way to each other."""

from __future__ import annotations

from importlib import import_module

from crux_torch.doctor.check import Check, Part
from crux_torch.errors import SettingsError
from crux_torch.host.pcie import PcieTree
from crux_torch.own_folders import group_id, usable_folder
from crux_torch.settings import Settings

PART = Part(
    "host links", "jobs of lower levels do not give way to others on this host's PCIe links"
)


def semaphores(settings: Settings) -> Check:
    """Whether the semaphores of the links work, and which links ``CRUX_LINKS`` names here."""
    if settings.links == ("none",):
        remedy = "set CRUX_LINKS=auto if jobs on this host meet on PCIe links (docs/pcie.md)"
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
        remedy = "docs/pcie.md says which folder it takes: have others' files there removed"
        return PART.missing(str(error), remedy)
    if settings.links != ("auto",):
        return PART.ok(f"stand-in links {', '.join(settings.links)}")
    tree = PcieTree.read()
    if tree.obstacle is not None:
        remedy = "nothing on hosts without GPUs; in a virtual machine, name the links in CRUX_LINKS"
        return PART.missing(tree.obstacle, remedy)
    return PART.ok(f"{len(tree.links())} PCIe links above GPUs and NICs")
