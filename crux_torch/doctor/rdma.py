"""Queue pairs: the library, the devices, and what can be changed on live queue pairs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from crux_torch.apply import standin
from crux_torch.doctor.check import Check, Part
from crux_torch.errors import CruxError
from crux_torch.host.rdma import RdmaDevice

#: As programs and NCCL ask for them.
VERBS, MLX5 = "libibverbs.so.1", "libmlx5.so.1"
LIVE_PORT = "mlx5dv_modify_qp_udp_sport"

Loader = Callable[[str], Any]


def verbs(load: Loader = ctypes.CDLL) -> Check:
    """Whether libibverbs is installed."""
    part = Part("libibverbs", "no RDMA: NCCL uses sockets, which Crux steers as well")
    try:
        load(VERBS)
    except OSError as error:
        remedy = "apt-get install libibverbs1 ibverbs-providers (in the training container too)"
        return part.missing(str(error), remedy)
    return part.ok(f"{VERBS} loads")


def stand_in(env: Mapping[str, str]) -> Iterator[Check]:
    """Whether Crux can put its own library in front of the libibverbs that a job loads."""
    part = Part("libibverbs stand-in", "Crux can't set the paths and classes of queue pairs")
    try:
        real = standin.find_real(env)
        if real is None:
            return
        made = standin.prepare(real, existing=env)
    except (CruxError, OSError) as error:
        remedy = "apt-get install libibverbs-dev, then `pip install --no-build-isolation .`"
        yield part.missing(str(error), remedy)
    else:
        yield part.ok(f"{made} for {real}")


def devices(present: Sequence[RdmaDevice], load: Loader = ctypes.CDLL) -> Iterator[Check]:
    """Which RDMA devices there are, and what can be changed on their live queue pairs."""
    if not present:
        part = Part("RDMA devices", "there are no queue pairs; Crux steers TCP connections only")
        remedy = (
            "nothing if there is no RDMA NIC; else install its driver (in a container, add "
            "--device /dev/infiniband)"
        )
        yield part.missing("none", remedy)
        return
    yield from map(_addresses, present)
    part = Part("pyverbs", "limits and rates of RDMA devices are unknown")
    if not any(device.limits for device in present):
        found_out = "it can't open a device" if find_spec("pyverbs") else "not installed"
        remedy = "apt-get install python3-pyverbs (system Python); allow access to /dev/infiniband"
        yield part.missing(found_out, remedy)
    else:
        paced = [d.name for d in present if d.limits and d.limits.rate_limit_Bps]
        yield part.ok(f"rate limits of queue pairs: {', '.join(paced) or 'on no device'}")
    yield live_ports(present, load)


def _addresses(device: RdmaDevice) -> Check:
    """Whether the source port of a device's packets selects the path: only with RoCE v2."""
    part = Part(device.name, "its queue pairs can't follow the planned paths")
    ports = [port for port in device.ports if port.active]
    addresses = [gid.ip for port in ports for gid in port.routable]
    if addresses:
        return part.ok(f"RoCE v2 on {', '.join(dict.fromkeys(addresses))}")
    if not ports:
        return part.missing("no active port", "bring its link up")
    if any(port.link_layer == "InfiniBand" for port in ports):
        found = "InfiniBand: its subnet manager chooses the paths"
        return part.missing(found, "nothing; for priorities see InfiniBand in docs/classes.md")
    remedy = "give its interface an IP address; the device must support RoCE v2"
    return part.missing("no RoCE v2 address", remedy)


def live_ports(present: Sequence[RdmaDevice], load: Loader = ctypes.CDLL) -> Check:
    """Whether the source port of a live queue pair can be changed; some answer EOPNOTSUPP."""
    cost = "to change the path of a live queue pair, its process group switches to new connections"
    part = Part("live UDP source port", cost)
    names = [device.name for device in present if device.is_mlx5]
    if not names:
        remedy = "nothing; only NVIDIA ConnectX (mlx5) has a call for it"
        return part.missing("no mlx5 device", remedy)
    try:
        if hasattr(load(MLX5), LIVE_PORT):
            return part.ok(f"{LIVE_PORT}() for {', '.join(names)}, if the firmware allows it")
    except OSError as error:
        return part.missing(str(error), "apt-get install ibverbs-providers")
    return part.missing(f"{MLX5} lacks {LIVE_PORT}()", "install rdma-core 33 or newer")
