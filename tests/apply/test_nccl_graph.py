"""NCCL's choice of NICs, from its own dumped graph, is what this package computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pcie_layouts as layouts
import pytest

from crux_torch.host.interfaces import Nic
from lab.nccl import graph, library
from lab.nccl.library import NcclUnavailableError

pytestmark = pytest.mark.full


@pytest.mark.parametrize("layout", [layouts.hgx_h100, layouts.dgx_a100])
def test_rings_leave_by_the_nic_of_a_gpu(
    tmp_path: Path, layout: Callable[[], list[layouts.Entry]]
) -> None:
    try:
        library.installed()
    except NcclUnavailableError as error:
        pytest.skip(str(error))
    tree = layouts.read(tmp_path / "sysfs", layout())
    gpus, addresses = tree.of_kind("gpu"), tree.of_kind("nic")
    nics = [Nic(f"nic{i}", graph.NIC_MBPS / 8 * 1e6, None, a) for i, a in enumerate(addresses)]
    rings = graph.channels(tmp_path / "sysfs", tmp_path)
    assert rings
    for ring in rings:
        assert sorted(ring.gpus) == list(range(len(gpus)))
        assert ring.enters == ring.leaves, "of one rail"
        assert tree.nic_of(gpus[ring.gpus[0]], nics) == nics[ring.enters]
    entered = [ring.enters for ring in rings]
    assert len(set(entered)) == len(entered)
    # Where GPUs share the link to their NICs, as on the second, NCCL leaves NICs idle.
    alone = {gpu for gpu in gpus if len(tree.nics_of(gpu, nics)) == 1}
    assert {nics[i] for i in entered} >= {tree.nic_of(gpu, nics) for gpu in alone}
