"""The tiers of the tests, and what runs beside what.

CONTRIBUTING.md describes the tiers. ``slow`` and ``full`` are the markers that divide them, and
``alone`` is for tests beside which nothing runs. ``flaky`` is for tests that start torchrun or
stock Gloo; every second try is listed in the summary.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from tiers import MARKED, MARKS

HERE = Path(__file__).parent

#: They are for processes on the rig: test_on_rig.py starts one for each file.
collect_ignore = [] if "CUDA_RIG_OPERATORS" in os.environ else ["on_rig"]

# More threads than processors wait for each other: each worker, and what it starts, has one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every run of a tier draws the same examples, `make test-all` more of them; "new" draws others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, derandomize=True, max_examples=500)
hypothesis.settings.register_profile("new", deadline=None, max_examples=1000)
_profile = os.environ.get("HYPOTHESIS_PROFILE", "same")
hypothesis.settings.load_profile(_profile)
if _profile != "new":
    # Hypothesis also draws constants of the modules that are loaded, which differ by worker.
    providers.is_local_module_file = lambda _: False

#: The fixture of an emulated machine, which the tests that use it share.
EMULATED = "guest"
#: What its first test may take: it starts the machine, and plays what the others look at.
GUEST_LIMIT_S = 1500


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(HERE.parent).as_posix()


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "full"))


def _limit_s(item: pytest.Item) -> float:
    """Returns the seconds of its own timeout mark, which the longest tests have."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if EMULATED in getattr(item, "fixturenames", ()):
            item.add_marker("full")
            item.add_marker(pytest.mark.xdist_group(EMULATED))
            item.add_marker(pytest.mark.timeout(GUEST_LIMIT_S))
        elif item.path.parent.name == "gpu":
            item.add_marker("full")
        # A file's tests share fixtures, so one worker runs them all.
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file(item)))
    config.stash[MARKED] = {
        mark: {_file(item) for item in items if item.get_closest_marker(mark)} for mark in MARKS
    }
    # The long ones first, so that no worker is left with one at the end.
    long_files = {_file(item) for item in items if _is_long(item)}
    limit_s: dict[str, float] = {}
    for item in items:
        limit_s[_group(item)] = max(limit_s.get(_group(item), 0.0), _limit_s(item))
    items.sort(key=lambda item: (_file(item) not in long_files, -limit_s[_group(item)]))


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process as if nothing was compiled by inductor: other tests of this worker may have."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        monkeypatch.setattr(codecache.PyCodeCache, "modules", [])
