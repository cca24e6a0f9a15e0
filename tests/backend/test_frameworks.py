"""Calls of frameworks on groups and backends do the same under Crux:
docs/start/frameworks.md."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import cuda_rig
import pytest
from rig.identity import assert_same
from rig.job import ATTACHED, STOCK, Job, Outcomes
from rig.kind import GLOO, OLD_TORCH, RIG, Kind, named
from rig.part import PAIR, load

pytestmark = pytest.mark.slow

_calls = import_module("rig.frameworks")
WRAPPED, HOOKED = "all", "none"


def parts(kind: str) -> tuple[str, ...]:
    """Those of the frameworks that make sense on this kind of device."""
    mine = (name for name, each in load().items() if each.run.__module__ == _calls.__name__)
    return tuple(name for name in mine if kind in load()[name].kinds)


@pytest.fixture(scope="module", params=[RIG, GLOO])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The rig, built before ranks that have to start in time; and the CPU."""
    ok, reason = cuda_rig.available()
    if request.param == RIG and not ok:
        pytest.skip(reason)
    if request.param == RIG:
        cuda_rig.build()
    return named(request.param)


@pytest.fixture(scope="module")
def stock(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Job(kind, STOCK, PAIR, parts(kind.name)).run(tmp_path_factory.mktemp(kind.name) / STOCK)


@pytest.mark.parametrize("groups", [WRAPPED, HOOKED])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_calls_of_frameworks(groups: str, kind: Kind, stock: Outcomes, tmp_path: Path) -> None:
    if groups == HOOKED and (OLD_TORCH or kind.name == GLOO):
        pytest.skip("Gloo, and torch before 2.15, have no hooks")
    job = Job(kind, ATTACHED, PAIR, parts(kind.name), env={"CRUX_SWITCH_GROUPS": groups})
    ours = job.run(tmp_path / groups)
    for name in parts(kind.name):
        assert_same(ours[name], stock[name], kind, name)
