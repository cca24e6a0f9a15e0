"""Which GPUs of a host cruxrun gives to a job, who has claimed the others, and what it says."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from control_fakes import until
from fake_nvml import FakeGpu, FakeNvml
from store_server import ServerThread
from torch.distributed import run as torchrun

from crux_torch.agreement.claims import DeviceClaim, DeviceClaims
from crux_torch.dispatch.cluster import DispatchError, save, table_of
from crux_torch.dispatch.this_host import choose, estimated, model_of, rings_Bps
from crux_torch.host import nvml
from crux_torch.host.nvml import NvmlReport, read_nvml
from cruxrun import main as cruxrun
from evaluation.litegd import MODELS, host_table

PXB, SYS, OK, REFUSED = 20, 50, 0, 3
GPU, SWITCH = 0, 2


def address(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"


def dgx1(processes: Sequence[Sequence[int]] = ((),) * 8) -> FakeNvml:
    """Table 4 as NVML tells it."""
    model = MODELS["V100"]
    gpus = []
    for a in range(8):
        links = [
            (True, address(b), GPU) for b in range(8) if a != b for _ in range(model.links(a, b))
        ]
        peers = {
            b: (PXB if model.groups[a] == model.groups[b] else SYS, OK) for b in range(8) if a != b
        }
        gpus.append(
            FakeGpu(
                "Tesla V100-SXM2-32GB",
                *(address(a), f"GPU-{a}"),
                capability=(7, 0),
                nvlinks=links,
                peers=peers,
                processes=processes[a],
            )
        )
    library = FakeNvml(gpus)
    library.NVML_NVLINK_MAX_LINKS = 16  # type: ignore[attr-defined]
    return library


def numbers(report: NvmlReport, k: int, claimed: dict[str, str] | None = None, **env: str) -> Any:
    return [gpu.index for gpu in choose(report, k, env, claimed or {}).gpus]


def test_the_model_of_a_dgx_1_is_that_of_the_paper() -> None:
    report = read_nvml(dgx1(), pairs=True)
    model = model_of(report, report.gpus)
    for gpus in ((0, 2), (0, 1), (0, 1, 2, 3), (1, 2, 5, 6)):
        assert rings_Bps(model, gpus) == rings_Bps(MODELS["V100"], gpus)
    assert model.nvswitch_Bps == 0


def test_an_nvswitch_makes_all_gpus_equal() -> None:
    links = [(True, "00000000:77:00.0", SWITCH)] * 12
    library = FakeNvml(
        [FakeGpu(uuid=f"GPU-{i}", address=address(i), nvlinks=links) for i in (0, 1)]
    )
    report = read_nvml(library, pairs=True)
    assert estimated(report, report.gpus, 2).array[0b11] == 12 * 25e9


def test_free_gpus_with_the_most_bandwidth_are_chosen_in_ring_order() -> None:
    report = read_nvml(dgx1(), pairs=True)
    chosen = choose(report, 2, {}, {})
    best = host_table("V100").array
    pair = sum(1 << gpu.index for gpu in chosen.gpus)
    assert best[pair] == chosen.bandwidth_Bps == 50e9
    four = [gpu.index for gpu in choose(report, 4, {}, {}).gpus]
    assert best[sum(1 << i for i in four)] == 100e9


def test_what_is_taken_is_not_chosen() -> None:
    report = read_nvml(dgx1([(77,), (), (), (1, 2), (), (), (), ()]), pairs=True)
    chosen = choose(report, 4, {}, {"GPU-1": "gpt"})
    assert not {0, 1, 3} & {gpu.index for gpu in chosen.gpus}
    assert chosen.taken == {0: "1 process", 1: "job gpt", 3: "2 processes"}
    assert set(numbers(report, 2, CUDA_VISIBLE_DEVICES="GPU-2,GPU-4,0,6")) <= {2, 4, 6}
    with pytest.raises(DispatchError, match=r"6 GPUs asked for, and 5 of 8 are free \(0: 1 proc"):
        choose(report, 6, {}, {"GPU-1": "gpt"})


def test_a_table_decides_where_there_is_one() -> None:
    report = read_nvml(dgx1(), pairs=True)
    slow = dict.fromkeys([m for m in range(256) if m.bit_count() > 1], 1e9)
    table = table_of("h", map(str, range(8)), {**slow, 0b10010000: 9e9})
    assert sorted(gpu.index for gpu in choose(report, 2, {}, {}, table).gpus) == [4, 7]
    small = table_of("h", "012", {0b111: 1e9, 0b011: 1e9, 0b101: 1e9, 0b110: 1e9})
    with pytest.raises(DispatchError, match="no device '3': measure this host"):
        choose(report, 2, {}, {}, small)


def test_without_nvml_or_with_too_many_rings_the_remedy_is_said() -> None:
    with pytest.raises(DispatchError, match="no driver; name them in CUDA_VISIBLE_DEVICES"):
        choose(NvmlReport(error="no driver"), 1, {}, {})
    many = FakeNvml([FakeGpu(uuid=f"GPU-{i}", address=address(i)) for i in range(12)])
    with pytest.raises(DispatchError, match="name a table"):
        choose(read_nvml(many, pairs=True), 6, {}, {})


def test_claims_are_taken_all_or_none_and_end_with_their_lease() -> None:
    now = [0.0]
    with ServerThread(clock=lambda: now[0]) as server:
        client = server.client()
        claims = DeviceClaims(client, "lab")
        first = {f"GPU-{i}": DeviceClaim(job="a", incarnation="1", index=i) for i in (0, 1)}
        second = {f"GPU-{i}": DeviceClaim(job="b", incarnation="2", index=i) for i in (2, 1)}
        assert claims.take("h/1", first, 10.0)
        assert not claims.take("h/1", second, 10.0)
        assert claims.taken() == {"h/1": first}, "GPU-2 was given back"
        now[0] = 8.0
        claims.renew("h/1", first, 10.0)
        now[0] = 15.0
        assert claims.taken() == {"h/1": first}
        now[0] = 20.0
        assert claims.take("h/1", second, 10.0)
        claims.renew("h/1", first, 10.0)
        assert claims.taken()["h/1"]["GPU-1"].job == "b", "it has a new owner"
        claims.release("h/1", first)
        assert claims.taken() == {"h/1": second}
        client.put("crux/lab/devices/h/x", b"junk")
        assert claims.taken() == {"h/1": second}
        client.close()


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls cruxrun where NVML has a DGX-1; what torchrun is given runs ``body``."""
    for name in list(os.environ):
        if name.startswith(("CRUX_", "PET_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(nvml, "bounded_report", lambda: read_nvml(dgx1(), pairs=True))

    def launched(body: Any, *argv: str) -> None:
        monkeypatch.setattr(torchrun, "run", lambda args: body(dict(os.environ)))
        cruxrun.main(["--crux-dispatch", "auto", *argv, "train.py"])

    return launched


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_the_launcher_shows_the_job_what_it_chose_and_says_so(
    launch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, str]] = []
    launch(seen.append, "--nproc-per-node", "2", "--crux-store", "none")
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-2"
    assert seen[0]["CRUX_DISPATCH"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert "GPUs 0,2 by local rank, 50.0 GB/s" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_the_launchers_of_two_jobs_choose_different_gpus(
    launch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServerThread() as server:
        client = server.client()
        store = ["--crux-store", f"tcp://127.0.0.1:{server.port}", "--crux-lease-s", "1"]
        claims = DeviceClaims(client, "default")
        seen: list[str] = []

        def second(env: dict[str, str]) -> None:
            seen.append(env["CUDA_VISIBLE_DEVICES"])

        def first(env: dict[str, str]) -> None:
            second(env)
            (mine,) = claims.taken().values()
            assert set(mine) == {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}
            # Renewed: it outlives its lease.
            threading.Event().wait(2.5)
            with mock.patch.dict(os.environ):
                # Another shell's environment.
                del os.environ["CUDA_VISIBLE_DEVICES"]
                launch(second, "--nproc-per-node", "4", *store, "--crux-job", "second")

        launch(first, "--nproc-per-node", "4", *store, "--crux-job", "first")
        until(lambda: claims.taken() == {}, what="the claims are given up")
        client.close()
    one, other = (set(devices.split(",")) for devices in seen)
    assert len(one | other) == 8
    assert "0: job first" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_a_request_that_can_not_be_met_stops_the_launcher(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "host.json"
    save(table_of("h", "01", {0b11: 1e9}), table)
    for argv, says in (
        (["--nproc-per-node", "9"], "9 GPUs asked for, and 8 of 8 are free"),
        (["--nproc-per-node", "2", "--crux-dispatch", str(table)], "has no device '2'"),
    ):
        with pytest.raises(SystemExit) as ended:
            launch(lambda env: pytest.fail("started"), "--crux-store", "none", *argv)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
