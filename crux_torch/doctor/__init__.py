"""The checks of ``crux doctor``: what Crux can use here, and what is off without it.

If possible, a check tries the thing itself. Each takes a second or so.
"""

from __future__ import annotations

from collections.abc import Mapping

from crux_torch.doctor import (
    cluster,
    gpu,
    links,
    nccl,
    privileges,
    qos,
    rdma,
    sockets,
    software,
    transport,
)
from crux_torch.doctor.check import Check, Part
from crux_torch.errors import SettingsError
from crux_torch.host.qos import interfaces, read
from crux_torch.host.rdma import rdma_devices
from crux_torch.settings import Settings
from crux_torch.variables import misspelt_in_words

__all__ = ["Check", "examine"]


def examine(env: Mapping[str, str]) -> list[Check]:
    """All checks, in the order in which things depend on each other.

    Args:
        env: the environment that a job would be started in.
    """
    part = Part("settings", "cruxrun does not start a job")
    try:
        settings = Settings.from_env(env)
        first = _no_misspelt(env)
    except SettingsError as error:
        settings = Settings()
        first = part.broken(str(error), "correct the variable")
    settings, said, of_maps = qos.maps(settings)
    devices = rdma_devices()
    return [
        first,
        software.torch_release(),
        software.extension(),
        *software.backends(),
        software.autoload(env),
        transport.library(),
        transport.preload(env, settings),
        *of_maps,
        *sockets.classes(settings),
        *qos.of_interfaces(settings, said, [read(name) for name in interfaces()], devices),
        sockets.source_ports(settings),
        sockets.pacing(),
        sockets.probing(),
        privileges.live_paths(),
        *gpu.gpus(settings),
        *gpu.nccl_choices(env),
        rdma.verbs(),
        *rdma.stand_in(env),
        *rdma.devices(devices),
        *nccl.traffic_class(env, settings),
        *nccl.unreached(env),
        *nccl.forced_classes(devices),
        *nccl.ecn_bits(env, settings, devices),
        links.semaphores(settings),
        cluster.store(settings),
        *cluster.topology(settings),
        privileges.namespaces(),
    ]


def _no_misspelt(env: Mapping[str, str]) -> Check:
    part = Part("settings", "it changes nothing, and what it was meant to set keeps its default")
    if unknown := misspelt_in_words(env):
        return part.missing(unknown, "correct its name, or unset it (docs/settings.md)")
    return part.ok("every CRUX_* variable is valid")
