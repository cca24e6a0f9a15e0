"""What ``crux doctor`` looks at: each part that Crux uses, and what its absence costs.

Every finding comes from trying the thing, not from a version number, and takes a second at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from crux_torch.doctor import (
    cluster,
    gpu,
    links,
    nccl,
    privileges,
    rdma,
    sockets,
    software,
    transport,
)
from crux_torch.doctor.check import Check
from crux_torch.errors import SettingsError
from crux_torch.settings import Settings

__all__ = ["Check", "examine"]


def examine(env: Mapping[str, str]) -> list[Check]:
    """Every check, in the order in which things depend on each other.

    Args:
        env: the environment that a job would be started in.
    """
    try:
        settings = Settings.from_env(env)
    except SettingsError as error:
        settings = Settings()
        checks = [Check("settings", "broken", str(error), "cruxrun refuses it", "correct it")]
    else:
        checks = [Check("settings", "ok", "every CRUX_* variable can be used")]
    probes: tuple[Callable[[], Iterator[Check]], ...] = (
        software.torch_release,
        software.extension,
        software.backends,
        lambda: software.autoload(env),
        transport.library,
        lambda: transport.preload(env, settings),
        lambda: sockets.classes(settings),
        lambda: sockets.source_ports(settings),
        sockets.pacing,
        sockets.probing,
        privileges.live_paths,
        lambda: gpu.gpus(settings),
        lambda: gpu.nccl_choices(env),
        rdma.verbs,
        lambda: rdma.stand_in(env),
        rdma.devices,
        lambda: nccl.traffic_class(env, settings),
        nccl.forced_classes,
        lambda: nccl.ecn_bits(env, settings),
        lambda: nccl.profiler(env, settings),
        lambda: links.semaphores(settings),
        lambda: cluster.store(settings),
        lambda: cluster.topology(settings),
        privileges.namespaces,
    )
    for probe in probes:
        checks.extend(probe())
    return checks
