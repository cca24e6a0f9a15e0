"""The tiers of the tests, what runs beside what, and which tests may be tried a second time.

CONTRIBUTING.md describes the tiers. ``slow`` and ``full`` are the markers that divide them, and
``alone`` is for tests beside which nothing runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

HERE = Path(__file__).parent

#: They are for processes on the rig: test_on_rig.py starts one for each file.
collect_ignore = [] if "CUDA_RIG_OPERATORS" in os.environ else ["on_rig"]

# Every run of a tier draws the same examples, `make test-all` more of them; "new" draws others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, derandomize=True, max_examples=500)
hypothesis.settings.register_profile("new", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

#: Tests of real training processes. Stock Gloo and torchrun, which they start too, now and then
#: abort a process that is being torn down or lose a race for a port; a test that fails because of
#: this package fails twice. Every second try is listed in the summary.
REAL_PROCESSES = (
    "test_absences.py",
    "test_backend.py",
    "test_contest.py",
    "test_cruxrun_processes.py",
    "test_demo_job.py",
    "test_disk.py",
    "test_dispatch_live.py",
    "test_doctor_agreement.py",
    "test_examples.py",
    "test_first_ten_minutes.py",
    "test_frameworks.py",
    "test_guard_fabric.py",
    "test_kill.py",
    "test_mix.py",
    "test_mlcc_job.py",
    "test_nccl_sockets.py",
    "test_on_rig.py",
    "test_partition.py",
    "test_paths_fabric.py",
    "test_probe_fabric.py",
    "test_rank_cut_off.py",
    "test_runtime_agent.py",
    "test_store_etcd.py",
    "test_store_paused.py",
    "test_store_process.py",
)
#: The fixture of an emulated machine, which the tests that use it share.
EMULATED = "guest"


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(HERE.parent).as_posix()


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "full"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if EMULATED in getattr(item, "fixturenames", ()):
            item.add_marker("full")
            item.add_marker(pytest.mark.xdist_group(EMULATED))
        elif item.path.parent.name == "gpu":
            item.add_marker("full")
        if item.path.name.startswith(REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
        # A file's tests share fixtures, so one worker runs them all.
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file(item)))
    # The long ones first, so that no worker is left with one at the end.
    long_files = {_file(item) for item in items if _is_long(item)}
    items.sort(key=lambda item: _file(item) not in long_files)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process as if nothing was compiled by inductor: other tests of this worker may have."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        monkeypatch.setattr(codecache.PyCodeCache, "modules", [])
