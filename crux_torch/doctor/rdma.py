"""Queue pairs: the library, the devices, and what they can be told live."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from crux_torch.apply import standin
from crux_torch.doctor.check import Check
from crux_torch.errors import CruxError
from crux_torch.fabric.rdma import RdmaDevice, rdma_devices

#: As programs and NCCL ask for them.
VERBS, MLX5 = "libibverbs.so.1", "libmlx5.so.1"
LIVE_PORT = "mlx5dv_modify_qp_udp_sport"

Loader = Callable[[str], Any]


def verbs(load: Loader = ctypes.CDLL) -> Iterator[Check]:
    """Whether there is a libibverbs for queue pairs to go through."""
    try:
        load(VERBS)
    except OSError as error:
        cost = "no RDMA in this environment: NCCL goes through sockets, and those are steered"
        remedy = "apt-get install libibverbs1 ibverbs-providers (in the training container too)"
        yield Check("libibverbs", "missing", str(error), cost, remedy)
    else:
        yield Check("libibverbs", "ok", f"{VERBS} loads")


def stand_in(env: Mapping[str, str]) -> Iterator[Check]:
    """Whether a stand-in can be made for the libibverbs that a job would load."""
    part = "libibverbs stand-in"
    try:
        real = standin.find_real(env)
        if real is None:
            return
        made = standin.prepare(real, existing=env)
    except (CruxError, OSError) as error:
        cost = "queue pairs keep the path and class that NCCL and its driver give them"
        remedy = "apt-get install libibverbs-dev, then build again: pip install ."
        yield Check(part, "missing", str(error), cost, remedy)
    else:
        yield Check(part, "ok", f"{made} for {real}")


def devices(
    found: Callable[[], tuple[RdmaDevice, ...]] = rdma_devices, load: Loader = ctypes.CDLL
) -> Iterator[Check]:
    """Which devices there are, and what can be changed on their live queue pairs."""
    present = found()
    if not present:
        cost = "no queue pairs: there is nothing to steer but TCP connections"
        remedy = "none needed without RDMA NICs; else their driver, and --device /dev/infiniband"
        yield Check("RDMA devices", "missing", "none", cost, remedy)
        return
    for device in present:
        yield from _addresses(device)
    if not any(device.limits for device in present):
        found_out = "opens no device" if find_spec("pyverbs") else "does not import"
        cost = "limits and rates of RDMA devices are not known beforehand"
        remedy = "apt-get install python3-pyverbs (for the system's Python), /dev/infiniband"
        yield Check("pyverbs", "missing", found_out, cost, remedy)
    else:
        paced = [d.name for d in present if d.limits and d.limits.rate_limit_Bps]
        rates = f"rates of queue pairs: {', '.join(paced) or 'on no device'}"
        yield Check("pyverbs", "ok", rates)
    yield from live_ports(present, load)


def _addresses(device: RdmaDevice) -> Iterator[Check]:
    """Whether the source port of a device's packets can choose a path: on RoCE v2 only."""
    ports = [port for port in device.ports if port.active]
    addresses = [gid.ip for port in ports for gid in port.routable]
    if addresses:
        yield Check(device.name, "ok", f"RoCE v2 on {', '.join(dict.fromkeys(addresses))}")
        return
    if not ports:
        found, remedy = "no active port", "bring its link up"
    elif any(port.link_layer == "InfiniBand" for port in ports):
        found = "InfiniBand, whose subnet manager chooses the paths"
        remedy = "none; priorities go by service level: docs/classes.md, InfiniBand"
    else:
        found = "no RoCE v2 address"
        remedy = "give its interface an IP address; the device must know RoCE v2"
    yield Check(device.name, "missing", found, "its queue pairs take no planned path", remedy)


def live_ports(present: tuple[RdmaDevice, ...], load: Loader = ctypes.CDLL) -> Iterator[Check]:
    """Whether a live queue pair's source port can be changed by its device.

    Whether one device allows it shows when it is asked on a queue pair: some answer EOPNOTSUPP.
    """
    part = "live UDP source port"
    cost = "a live queue pair changes its path by drain and reset (CRUX_LIVE_QP), or by a switch"
    names = [device.name for device in present if device.is_mlx5]
    if not names:
        remedy = "NVIDIA ConnectX with mlx5; no other driver has a call for it"
        yield Check(part, "missing", "no mlx5 device", cost, remedy)
        return
    try:
        there = hasattr(load(MLX5), LIVE_PORT)
    except OSError as error:
        yield Check(part, "missing", str(error), cost, "apt-get install ibverbs-providers")
        return
    if there:
        found = f"{LIVE_PORT}() for {', '.join(names)}, where the device's firmware allows it"
        yield Check(part, "ok", found)
    else:
        yield Check(part, "missing", f"{MLX5} lacks {LIVE_PORT}()", cost, "rdma-core 33 or newer")
