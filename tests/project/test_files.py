"""Files that a user names: regular, bounded, and written whole or not at all."""

from __future__ import annotations

import gzip
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.agreement.inputs import TopologyReader
from crux_torch.apply.nccl import NcclVariables
from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    TableError,
    from_csv,
    from_nccl_tests,
    load,
)
from crux_torch.dispatch.predictor import load_network
from crux_torch.dispatch.samples import read_samples
from crux_torch.errors import SettingsError
from crux_torch.files import parse_json, read_file, write_file
from crux_torch.network.loaders import load_topology
from crux_torch.network.topology import TopologyError
from crux_torch.sim.catalogue import WorkloadError
from crux_torch.sim.scenario import ScenarioError, read_scenario
from crux_torch.sim.traces import load_csv
from crux_torch.store.endpoint import parse_etcd
from crux_torch.store.frames import read_secret
from evaluation.litegd import host_table


def one_host() -> DispatchCluster:
    table = host_table("V100")
    return DispatchCluster([table], np.zeros(1))


#: Every reader of a file that a user names, and the error that it raises.
READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "topology": (load_topology, TopologyError),
    "topology of the store": (TopologyReader().load, OSError),
    "secret": (lambda file: read_secret(str(file)), SettingsError),
    "certificate": (lambda file: parse_etcd("etcd://h:1").read(str(file)), SettingsError),
    "scenario": (read_scenario, ScenarioError),
    "trace": (load_csv, WorkloadError),
    "table": (load, TableError),
    "table of lines": (lambda file: from_csv(file, "a"), TableError),
    "nccl-tests": (lambda file: from_nccl_tests([file], "a"), TableError),
    "samples": (lambda file: read_samples(file, one_host()), TableError),
    "network": (lambda file: load_network(file, []), DispatchError),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(what: str, kind: str, tmp_path: Path) -> None:
    """Nobody writes into the FIFO, so a reader that opens it plainly never returns."""
    file = tmp_path / "given"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))
    if what == "network":
        pytest.importorskip("torch")
    read, error = READERS[what]
    with pytest.raises(error, match=r"regular file|No such device"):
        read(file)


def test_a_fifo_as_nccls_configuration_counts_as_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "conf")
    assert NcclVariables({"NCCL_CONF_FILE": str(tmp_path / "conf")}).get("NCCL_IB_TC") is None


@given(content=st.binary(max_size=3000), limit=st.integers(0, 3000), packed=st.booleans())
def test_a_read_never_returns_more_than_its_limit(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int, packed: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "content"
    file.write_bytes(gzip.compress(content, 0) if packed else content)
    if max(len(content), file.stat().st_size) > limit:
        with pytest.raises(OSError, match="more than"):
            read_file(file, limit, unpack=packed)
    else:
        assert read_file(file, limit, unpack=packed) == content


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.csv.gz"
    bomb.write_bytes(gzip.compress(bytes(1 << 26)))
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(OSError, match="unpacks to more than 16 MiB"):
        read_file(bomb, 1 << 24, unpack=True)
    half = gzip.compress(b"a,b\n" * 1000)
    for damaged in (half[:-9], half[:20], half + b"x" * 20):
        bomb.write_bytes(damaged)
        with pytest.raises(OSError, match="expected what gzip packed"):
            read_file(bomb, 1 << 24, unpack=True)
    bomb.write_bytes(half * 2)
    assert read_file(bomb, 1 << 24, unpack=True) == b"a,b\n" * 2000, "two members are one file"


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"1e999", b"\xff"])
def test_json_that_can_not_be_read_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested|JSON|range|UTF-8"):
        parse_json(text)


def test_a_full_disk_leaves_the_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    file.chmod(0o640)

    def full(descriptor: int, mode: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.fchmod", full)
        with pytest.raises(OSError, match="No space"):
            write_file(file, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"], "no partial file stays"
    assert file.read_text() == "old"
    write_file(file, "new")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_a_result_goes_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_file(link, b"content")
    assert link.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"content"
    mask = os.umask(0o027)
    try:
        write_file(tmp_path / "new", "")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    write_file("/dev/null", "nothing is lost")
    assert not stat.S_ISREG(os.stat("/dev/null").st_mode)
