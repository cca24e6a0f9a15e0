"""A NCCL communicator's traffic class: who chooses it, and that it reaches the stock creators.

No GPU is needed for the options, which are the real ones; no communicator is made.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crux_torch import backend, runtime
from crux_torch.apply import nccl
from crux_torch.control.warn_once import WarnOnce

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
DSCP = 40


@pytest.fixture(autouse=True)
def _says_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_warn", WarnOnce(logging.getLogger("crux_torch.apply.nccl")))
    for variable in nccl.OVERRIDES:
        monkeypatch.delenv(variable, raising=False)


def options() -> Any:
    return c10d.ProcessGroupNCCL.Options()


def given(script: Any, dscp: int | None = DSCP, **env: str) -> Any:
    return nccl.with_class(script, dscp, new=options, env=env)


def test_an_option_that_nobody_set_is_nccls_undefined() -> None:
    assert options().config.traffic_class == nccl.UNDEFINED


def test_the_class_is_the_tos_byte_and_the_scripts_options_stay_as_they_are() -> None:
    script = options()
    script.config.min_ctas = 3
    script.is_high_priority_stream = True
    classed = given(script)
    assert classed.config.traffic_class == DSCP << 2
    assert (classed.config.min_ctas, classed.is_high_priority_stream) == (3, True)
    assert script.config.traffic_class == nccl.UNDEFINED
    assert given(None).config.traffic_class == DSCP << 2


def test_without_a_level_nothing_is_made() -> None:
    script = options()
    assert given(script, None) is script
    assert given(None, None) is None


def test_the_scripts_own_class_wins_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    script = options()
    script.config.traffic_class = 106
    for _ in range(3):
        assert given(script) is script
    assert script.config.traffic_class == 106
    (record,) = caplog.records
    assert "traffic_class=106" in record.getMessage()


@pytest.mark.parametrize(
    ("variable", "classed"),
    [("NCCL_IB_TC", False), ("NCCL_IB_FIFO_TC", True), ("NCCL_IB_SL", True)],
)
def test_nccls_variables_are_left_to_win_and_that_is_said_once(
    variable: str, classed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        made = given(None, DSCP, **{variable: "3"})
        assert (made is not None) == classed
    (record,) = caplog.records
    assert record.getMessage() == f"{variable}=3 is set: {nccl.OVERRIDES[variable]}"
    assert nccl.overrides({variable: "3"}) == {f"{variable}=3": nccl.OVERRIDES[variable]}
    assert nccl.overrides({variable: ""}) == {}


def test_options_of_another_kind_are_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    script = object()
    assert given(script) is script
    assert "get no traffic class" in caplog.text


class FakeNccl:
    """What ``attach`` stands in for, as far as creation goes."""

    def __init__(self, store: Any, rank: int, size: int, script: Any) -> None:
        self.options = script


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for NCCL's class whose backends come out undecorated."""
    monkeypatch.setattr(backend, "_delegate", lambda name, inners, *rest: inners["cuda"])
    namespace = {"stock": FakeNccl, "public_name": "nccl", "devices": ("cuda",)}
    return backend._StandIn("ProcessGroupNCCL", (), namespace)


@pytest.mark.parametrize("switched_off", ["CRUX_NCCL_CLASS=0", "CRUX_DISABLE=1", ""])
def test_both_ways_of_creation_get_the_plans_class(
    switched_off: str, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off:
        monkeypatch.setenv(*switched_off.split("="))
    monkeypatch.setattr(runtime, "planned_dscp", lambda: DSCP)
    made: list[Any] = []
    plugin = SimpleNamespace(creator_fn=lambda opts, script: made.append(script))
    monkeypatch.setitem(c10d.Backend._plugins, "NCCL", plugin)
    script = options()
    backend._create_nccl(SimpleNamespace(split_from=None), script)
    made.append(attached(dist.HashStore(), 0, 1, script).options)  # type: ignore[attr-defined]
    expected = nccl.UNDEFINED if switched_off else DSCP << 2
    assert [classed.config.traffic_class for classed in made] == [expected, expected]
    assert script.config.traffic_class == nccl.UNDEFINED


@pytest.mark.parametrize(
    ("order", "expected"), [(None, None), ({"measuring": True}, None), ({"measuring": False}, DSCP)]
)
def test_a_communicator_does_not_keep_the_class_of_a_measurement(
    order: Any, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"order": order, "applied": {"dscp": DSCP}}
    agent = SimpleNamespace(active=True, status=lambda: status)
    monkeypatch.setattr(runtime, "_agent", agent)
    assert runtime.planned_dscp() == expected
    agent.active = False
    assert runtime.planned_dscp() is None
