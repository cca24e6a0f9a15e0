"""The DSCP maps of the topology's ``qos`` as settings, so that every process knows them at once."""

from __future__ import annotations

from crux_torch.fabric.topology import Topology
from crux_torch.settings import Settings


def of_the_topology(settings: Settings, topology: Topology | None) -> dict[str, str]:
    """The variables for the workers; none if the job's topology has no ``qos``.

    Raises:
        SettingsError: the settings have other maps than the file.
    """
    if topology is None or topology.qos is None:
        return {}
    from crux_torch.fabric.qos import with_qos

    found = with_qos(settings, topology.qos)
    told = {
        "CRUX_LEVELS": (found.levels,),
        "CRUX_RESERVED_LEVELS": found.reserved_levels,
        "CRUX_DSCP_MAP": found.dscp_map,
        "CRUX_RDMA_DSCP_MAP": found.rdma_dscp_map,
    }
    return {} if found is settings else {k: ",".join(map(str, v)) for k, v in told.items()}
