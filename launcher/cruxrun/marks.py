"""The DSCP maps of the topology's ``qos`` as settings, so that every process knows them at once."""

from __future__ import annotations

from pathlib import Path

from crux_torch.settings import Settings


def of_the_topology(settings: Settings) -> dict[str, str]:
    """The variables for the workers; none if the file has no ``qos``, or can't be read.

    Raises:
        SettingsError: the settings have other maps than the file.
    """
    from crux_torch.fabric.loaders import load_topology
    from crux_torch.fabric.qos import with_qos

    try:
        # A large file takes seconds to parse, and most have none.
        if not settings.topology or b"qos" not in Path(settings.topology).read_bytes():
            return {}
        topology = load_topology(settings.topology)
    except (OSError, ValueError):
        return {}  # the job's leader says so
    found = with_qos(settings, topology.qos)
    told = {
        "CRUX_LEVELS": (found.levels,),
        "CRUX_RESERVED_LEVELS": found.reserved_levels,
        "CRUX_DSCP_MAP": found.dscp_map,
        "CRUX_RDMA_DSCP_MAP": found.rdma_dscp_map,
    }
    return {} if found is settings else {k: ",".join(map(str, v)) for k, v in told.items()}
