"""Which NICs NCCL chooses, and in which order it visits GPUs, on hosts that are told to it.

Two hosts of the same PCIe tree make a communicator of all their GPUs without a GPU. NCCL dumps the
graph that it has found before it connects anything.

``python -m lab.nccl.graph HOST SYSFS FOLDER`` is one of the two hosts.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from crux_torch.host.pcie import PcieTree
from lab.nccl import communicator, library
from lab.nccl.communicator import IN_PROGRESS, Identity, begin
from lab.nccl.cuda import HostCuda
from lab.nccl.library import Library, NcclError, check
from lab.nccl.net import HOST_MEMORY, TABLE

#: The file that NCCL writes its graph to.
GRAPH = "graph"
_LIMIT_S = 150.0
_HOSTS = 2
#: Of NICs: megabits per second; of GPUs: links to an NVSwitch that all share.
NIC_MBPS, _NVLINKS = 200_000, 12
_CLASSES = {"gpu": "0x030200", "nic": "0x020700"}
_RING = "0"
_ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}


@dataclass(frozen=True)
class Channel:
    """One ring through a host: it enters by a NIC, visits all GPUs and leaves by a NIC.

    Attributes:
        enters, leaves: places of NICs in the order of their PCI addresses.
        gpus: likewise of GPUs, as visited.
    """

    enters: int
    leaves: int
    gpus: tuple[int, ...]


def channels(sysfs: Path, folder: Path) -> list[Channel]:
    """NCCL's rings through each of two hosts whose PCIe trees are in ``sysfs``.

    Raises:
        NcclError: NCCL did not get that far.
    """
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "lab.nccl.graph", str(host), str(sysfs), str(folder)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(_HOSTS)
    ]
    try:
        told = [host.communicate(timeout=_LIMIT_S)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    if any(host.returncode for host in hosts):
        raise NcclError("\n".join(told))
    graphs = ElementTree.parse(folder / GRAPH).getroot()
    (ring,) = (graph for graph in graphs if graph.get("id") == _RING)
    found = []
    for channel in ring:
        places = [(end.tag, int(end.get("dev", ""), 0)) for end in channel]
        gpus = tuple(place for tag, place in places if tag == "gpu")
        found.append(Channel(places[0][1], places[-1][1], gpus))
    return found


def topology(tree: PcieTree) -> str:
    """What NCCL reads from ``NCCL_TOPO_FILE``."""
    root = ElementTree.Element("system", version="1")
    made: dict[str, Any] = {}
    for kind in _CLASSES:
        for place, address in enumerate(tree.of_kind(kind)):  # type: ignore[arg-type]
            device = tree.devices[address]
            node = str(device.numa_node or 0)
            above = made.get(node)
            if above is None:
                cpu = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "143"}
                more = {"modelid": "49", "affinity": "ffffffff", "host_hash": "0x1"}
                above = ElementTree.SubElement(root, "cpu", numaid=node, **cpu, **more)
                made[node] = above
            # A root port, a switch's upstream port, its downstream port, and so on: NCCL wants
            # the lower ends of links.
            for end in (*device.bridges, address)[1::2]:
                if end not in made:
                    made[end] = _pci(
                        above, tree, end, _CLASSES.get(tree.devices[end].kind, "0x060400")
                    )
                above = made[end]
            if kind == "gpu":
                gpu = ElementTree.SubElement(above, "gpu", dev=str(place), sm="90", gdr="1")
                link = {"target": "0000:ff:00.0", "count": str(_NVLINKS), "tclass": "0x068000"}
                ElementTree.SubElement(gpu, "nvlink", **link)
            else:
                nic = ElementTree.SubElement(above, "nic")
                rate = {"speed": str(NIC_MBPS), "port": "1", "guid": hex(place + 1), "gdr": "1"}
                ElementTree.SubElement(nic, "net", name=f"nic{place}", dev=str(place), **rate)
    return ElementTree.tostring(root, encoding="unicode")


def _pci(above: Any, tree: PcieTree, address: str, of_class: str) -> Any:
    rate = tree.devices[address].current
    told = {"busid": address, "class": of_class}
    if rate is not None:
        told |= {"link_speed": f"{rate.speed_GTps:.1f} GT/s PCIe", "link_width": str(rate.lanes)}
    return ElementTree.SubElement(above, "pci", told)


class Nics:
    """NICs that are not there: NCCL's network code finds ``count``, and uses a real one for each.

    They reach memory of GPUs, which is the host's.
    """

    def __init__(self, nccl: Library, count: int) -> None:
        self._kept: list[Any] = [
            ctypes.create_string_buffer(f"nic{i}".encode()) for i in range(count)
        ]
        self._names = [ctypes.addressof(name) for name in self._kept]
        nccl.kept.append(self)
        self._table = nccl.words("ncclNetSocket")
        number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        three, five = (pointer, number, *[pointer] * 2), (pointer, number, *[pointer] * 3)
        replace = self._replace
        devices = replace("devices", (pointer,), lambda out: devices(out) or _told(out, count))
        properties = replace(
            "getProperties",
            (number, pointer),
            lambda place, out: properties(0, out) or self._tell(place, out),
        )
        listen = replace("listen", three, lambda net, _, *made: listen(net, 0, *made))
        connect = replace("connect", five, lambda net, _, *made: connect(net, 0, *made))
        register = replace(
            "regMr",
            (pointer, pointer, size, number, pointer),
            lambda end, data, length, _, made: register(end, data, length, HOST_MEMORY, made),
        )

    def _replace(self, name: str, arguments: tuple[Any, ...], answer: Any) -> Any:
        place = TABLE.index(name)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
        real, made = kind(self._table[place]), kind(answer)
        self._kept.append(made)
        self._table[place] = ctypes.cast(made, ctypes.c_void_p).value or 0
        return real

    def _tell(self, place: int, out: int) -> int:
        """Into ncclNetProperties: name, PCI path, GUID; memory that it reaches; megabits."""
        words = (ctypes.c_uint64 * 3).from_address(out)
        words[:] = (self._names[place], 0, place + 1)
        return _told(out + 24, 3) or _told(out + 36, NIC_MBPS)


def _told(out: int, value: int) -> int:
    ctypes.c_int.from_address(out).value = value
    return 0


def main(host: int, sysfs: Path, folder: Path) -> None:
    tree = PcieTree.read(sysfs)
    gpus = tree.of_kind("gpu")
    file, graph, identity = (folder / name for name in (f"topology.{host}", GRAPH, "identity"))
    file.write_text(topology(tree))
    os.environ.update(_ENVIRONMENT | {"NCCL_HOSTID": f"host{host}", "NCCL_TOPO_FILE": str(file)})
    # The first rank of all writes it.
    os.environ["NCCL_GRAPH_DUMP_FILE"] = str(graph)
    nccl = Library(library.installed())
    cuda = HostCuda(nccl, gpus)
    Nics(nccl, len(tree.of_kind("nic")))
    if host == 0:
        part = folder / "identity.part"
        part.write_bytes(communicator.identity(nccl))
        part.rename(identity)
    _wait_for(identity.exists)
    known = Identity.from_buffer_copy(identity.read_bytes())
    check("ncclGroupStart", nccl.exported.ncclGroupStart())
    handles = [ctypes.c_void_p() for _ in gpus]
    for device, handle in enumerate(handles):
        cuda.set_device(device)
        begin(nccl, handle, _HOSTS * len(gpus), known, host * len(gpus) + device)
    if nccl.exported.ncclGroupEnd() not in (0, IN_PROGRESS):
        raise NcclError("ncclGroupEnd")
    _wait_for(lambda: graph.exists() and graph.read_text().rstrip().endswith("</graphs>"))
    # What comes after it would connect GPUs, and nobody looks at that.
    os._exit(0)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end after {_LIMIT_S} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
