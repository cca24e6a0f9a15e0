"""One suite for a GPU with NCCL and for the rig: the device, the jobs' outcomes, the report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import kind as kinds
from rig.identity import Compared, World
from rig.job import ATTACHED, CRUX, STOCK, Job
from rig.kind import ROOT, Kind
from rig.part import ALONE, PAIR, load
from rig.report import Report

#: ``make test-gpu`` sets it: without a GPU the suite fails instead of running on the rig.
REQUIRE = "CRUX_TEST_GPU"
#: Where the report goes: on a GPU, the published one by default; on the rig, nowhere.
RESULTS = "CRUX_GPU_RESULTS"

#: What is worth most comes first, in case the time on a GPU ends early.
ORDER = (
    "test_gpu_durations.py",
    "test_gpu_identity.py",
    "test_gpu_switch.py",
    "test_gpu_flops.py",
    "test_gpu_two_jobs.py",
    "test_gpu_network.py",
    "test_gpu_failures.py",
    "test_gpu_host.py",
    "test_gpu_rig.py",
)

#: Its tests compare worlds.
COMPARING = "test_gpu_identity.py"
#: Parts that also run with ``init_process_group("crux")``.
UNDER_ITS_OWN_NAME = ("all_reduce", "coalesced", "sub_groups", "ddp", "fsdp2")

_report: Report | None = None


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(REQUIRE) == "1" and not kinds.has_cuda():
        raise pytest.UsageError("the GPU suite was asked for, and torch finds no GPU with NCCL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if item.path.parent == here]
    mine.sort(key=lambda item: ORDER.index(item.path.name))
    ordered = iter(mine)
    items[:] = [next(ordered) if item.path.parent == here else item for item in items]


def _present() -> Kind | str:
    """The kind of device, or why there is none."""
    try:
        return kinds.present()
    except LookupError as error:
        return str(error)


@pytest.fixture(scope="session")
def kind() -> Kind:
    """The device that this session's tests run on."""
    found = _present()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def report(kind: Kind) -> Iterator[Report]:
    """What this session found."""
    global _report
    published = ROOT / "benchmarks/results/gpu_suite" if kind.is_gpu else ""
    path = os.environ.get(RESULTS, published)
    _report = Report(Path(path) if path else None, kind)
    yield _report
    _report.end()


@pytest.fixture(autouse=True)
def _reported(report: Report) -> None:
    """Every test of this folder is in the report."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _report is None or "gpu/test_gpu_" not in report.nodeid:
        return
    if report.when == "call" or report.outcome != "passed":
        why = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            why = str(report.longrepr).strip().splitlines()[-1][:300]
        name = report.nodeid.rpartition("/")[2]
        _report.test(name, report.outcome, report.duration, why)


@pytest.fixture(scope="session")
def pair_works(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why two ranks can't be had here; empty where they can."""
    job = Job(kind, STOCK, PAIR, ("all_reduce",), limit_s=40.0)
    (outcome, *others) = job.run(tmp_path_factory.mktemp("pair"))["all_reduce"]
    failed = [each for each in (outcome, *others) if each.kind != "value"]
    return str(failed[0].value) if failed else ""


@pytest.fixture(params=(ALONE, PAIR), ids=("alone", "pair"))
def size(request: pytest.FixtureRequest) -> int:
    """Ranks in the world; two of them share one GPU."""
    if request.param == PAIR:
        request.getfixturevalue("pair")
    return int(request.param)


@pytest.fixture
def pair(pair_works: str) -> int:
    """Two ranks; skips where one GPU can't have two."""
    if pair_works:
        pytest.skip(f"two stock NCCL ranks on one GPU do not work here: {pair_works[-200:]}")
    return PAIR


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "named_part" in metafunc.fixturenames:
        metafunc.parametrize("named_part", UNDER_ITS_OWN_NAME)


@pytest.fixture(scope="session")
def compared(
    request: pytest.FixtureRequest,
    kind: Kind,
    pair_works: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Compared]:
    """The outcomes of all parts that the chosen tests ask for."""
    sizes = (ALONE,) if pair_works else (ALONE, PAIR)
    worlds = dict.fromkeys(
        world
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path.name == COMPARING
        for world in _worlds(item, kind)
        if world.size in sizes
    )
    found = Compared(kind, tmp_path_factory.mktemp("jobs"), worlds, UNDER_ITS_OWN_NAME)
    yield found
    found.close()


def _worlds(item: pytest.Function, kind: Kind) -> Iterator[World]:
    """The worlds that a test compares."""
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    if "named_part" in chosen:
        yield from (World(mode, PAIR, False) for mode in (STOCK, CRUX))
    elif "name" in chosen:
        each, size = load()[chosen["name"]], chosen["size"]
        if kind.name in each.kinds:
            yield from (World(mode, size, each.eager) for mode in (STOCK, ATTACHED))
