"""A NCCL communicator's traffic class: who chooses it, and that it reaches the stock creators.

No GPU is needed for the options, which are the real ones; no communicator is made.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dscp_maps import CLASS_SELECTORS, MARKS
from nccl_stand_in import ProcessGroupNCCL
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from crux_torch.agent import AGENT
from crux_torch.agent.follower import Follower
from crux_torch.agent.orders import Order
from crux_torch.agent.pipeline import Pipeline
from crux_torch.apply import nccl
from crux_torch.apply.dscp import Ecn
from crux_torch.apply.nccl import ECN_BITS, LABEL_COUNT, NcclLabels, label_of
from crux_torch.apply.transport import TransportError
from crux_torch.backend import inner_backends
from crux_torch.backend.handover import device as steps
from crux_torch.backend.inner_backends import like_nccl
from crux_torch.backend.register import StandIn
from crux_torch.errors import CruxError
from crux_torch.logs import WarnOnce
from crux_torch.settings import Marks, Settings

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
    none = NcclLabels(lambda: None)
    return nccl.with_class(script, dscp, new=options, env=env, labels=none, ecn=0)


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
    assert [str(one) for one in nccl.overrides({variable: "3"})] == [f"{variable}=3"]
    assert nccl.overrides({variable: ""}) == nccl.overrides({variable: "-1"}) == []


def test_a_class_in_nccls_file_wins_too_and_its_place_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_IB_TC=106\n")
    assert given(None, DSCP, NCCL_CONF_FILE=str(conf)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"NCCL_IB_TC=106 in {conf} is set")
    # Set but empty, the variable keeps the file's value out.
    made = given(None, DSCP, NCCL_CONF_FILE=str(conf), NCCL_IB_TC="")
    assert made.config.traffic_class == DSCP << 2


def test_options_of_another_kind_are_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    script = object()
    assert given(script) is script
    assert "get no traffic class" in caplog.text


class Library:
    """What the transport library was told of labels; it refuses where it is closed."""

    def __init__(self) -> None:
        self.told: dict[int, tuple[str, int]] = {}
        self.closed = False

    def __call__(self, label: int, owner: str, dscp: int) -> None:
        if self.closed:
            raise TransportError(22, "Invalid argument")
        self.told[label] = owner, dscp


def test_with_the_verbs_shim_the_class_is_a_label_that_goes_out_as_the_levels() -> None:
    library = Library()
    labels = NcclLabels(lambda: library)
    script = options()
    script.group_name = "3"
    classed = nccl.with_class(script, DSCP, new=options, env={}, labels=labels, ecn=2)
    label = label_of("3")
    assert classed.config.traffic_class == label | 2
    # Whatever a peer's host is configured for.
    assert library.told == {label | ecn: ("3", 0) for ecn in ECN_BITS}
    labels.set_dscp(DSCP)
    assert library.told == {label | ecn: ("3", DSCP) for ecn in ECN_BITS}
    other = nccl.with_class(None, None, new=options, owner="4", env={}, labels=labels, ecn=0)
    assert other.config.traffic_class == label_of("4") != label
    assert library.told[label_of("4")] == ("4", DSCP)
    assert script.config.traffic_class == nccl.UNDEFINED


def test_a_library_that_takes_no_label_leaves_the_class() -> None:
    library = Library()
    library.closed = True
    labels = NcclLabels(lambda: library)
    classed = nccl.with_class(None, DSCP, new=options, owner="3", env={}, labels=labels, ecn=0)
    assert classed.config.traffic_class == DSCP << 2


def test_labels_leave_the_bits_of_ecn_and_of_the_service_level_alone() -> None:
    names = [*map(str, range(LABEL_COUNT)), "default_pg", "²", "", "x" * 100]
    assert len({label_of(name) for name in names[:LABEL_COUNT]}) == LABEL_COUNT
    for name in names:
        assert 0 < label_of(name) < 256
        assert label_of(name) & 0xF == 0


def test_groups_that_share_a_label_are_listed_together() -> None:
    library = Library()
    labels = NcclLabels(lambda: library)
    assert labels.give("0") == labels.give(str(LABEL_COUNT)) == labels.give("0")
    assert library.told == {label_of("0") | ecn: ("0,15", 0) for ecn in ECN_BITS}
    assert NcclLabels(lambda: None).give("0") is None


class FakeNccl:
    """What ``attach`` stands in for, as far as creation goes."""

    def __init__(self, store: Any, rank: int, size: int, script: Any) -> None:
        self.options = script


@pytest.fixture
def attached() -> Any:
    """A stand-in for NCCL's class whose backends come out undecorated."""
    return StandIn("ProcessGroupNCCL", (FakeNccl,), {})


def _plans(dscp: Callable[[], int | None], *, may_mark_pairs: bool = True) -> Any:
    """A background thread whose plan gives queue pairs that DSCP value."""
    pipeline = type("Pipeline", (), {"planned_qp_dscp": property(lambda _: dscp())})()
    pipeline.may_mark_pairs = may_mark_pairs
    return SimpleNamespace(pipeline=pipeline, active=True)


@pytest.mark.parametrize("switched_off", ["CRUX_TUNING=nccl_class=0", "CRUX_DISABLE=1", ""])
def test_both_ways_of_creation_get_the_plans_class(
    switched_off: str, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off:
        monkeypatch.setenv(*switched_off.split("=", 1))
    monkeypatch.setattr(AGENT, "background", _plans(lambda: DSCP))
    made: list[Any] = []
    plugin = SimpleNamespace(creator_fn=lambda opts, script: made.append(script), extended_api=True)
    monkeypatch.setitem(c10d.Backend._plugins, "NCCL", plugin)
    script = options()
    opts = SimpleNamespace(split_from=None, group_id="7")
    classed = inner_backends.with_nccl_class("nccl", script, opts.group_id)
    inner_backends.create("nccl", opts, classed)
    made.append(attached(dist.HashStore(), 0, 1, script).options)  # type: ignore[attr-defined]
    expected = nccl.UNDEFINED if switched_off else DSCP << 2
    assert [each.config.traffic_class for each in made] == [expected, expected]
    assert script.config.traffic_class == nccl.UNDEFINED


@pytest.mark.parametrize(
    ("level", "measuring", "expected"),
    [(5, False, 40), (5, True, None), (None, False, None), (9, False, None)],
)
def test_a_communicator_does_not_keep_the_class_of_a_measurement(
    level: int | None, measuring: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = object.__new__(Pipeline)
    own.settings = Settings(rdma_dscp_map=CLASS_SELECTORS)
    own._follower = follower = object.__new__(Follower)
    follower.order = None
    assert own.planned_qp_dscp is None
    assert own.may_mark_pairs, "a label may be given before the first order"
    follower.order = Order(
        incarnation="i", number=1, level=level, marks=MARKS, measuring=measuring, valid_s=15.0
    )
    assert own.planned_qp_dscp == expected
    monkeypatch.setattr(nccl, "process_ecn", lambda: Ecn(0, "the test says so"))
    monkeypatch.setattr(nccl.LABELS, "give", lambda owner, ecn: None)
    background = SimpleNamespace(pipeline=own, active=True)
    monkeypatch.setattr(AGENT, "background", background)
    given = AGENT.nccl_options(options(), options, "0").config.traffic_class
    assert given == (nccl.UNDEFINED if expected is None else expected << 2)
    background.active = False
    assert AGENT.nccl_options(options(), options, "0").config.traffic_class == nccl.UNDEFINED


@pytest.mark.parametrize("marks", [None, Marks(tcp=CLASS_SELECTORS, usable=(0, 1, 2))])
def test_without_a_map_for_queue_pairs_a_communicator_is_made_as_the_script_asked(
    marks: Marks | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a class, or a label, was made")

    monkeypatch.setattr(nccl, "with_class", never)
    own = object.__new__(Pipeline)
    own.settings = Settings(dscp_map=CLASS_SELECTORS)
    own._follower = follower = object.__new__(Follower)
    background = SimpleNamespace(pipeline=own, active=True)
    monkeypatch.setattr(AGENT, "background", background)
    script = options()
    of = {"incarnation": "i", "number": 1, "level": 1, "valid_s": 15.0}
    for follower.order in (None, Order(**of, marks=marks)):
        assert AGENT.nccl_options(script, options, "0") is script
    own.settings = Settings(rdma_dscp_map=CLASS_SELECTORS, dry_run=True)
    follower.order = None
    assert AGENT.nccl_options(script, options, "0") is script


@pytest.mark.parametrize("scripts", [None, 106])
def test_a_group_that_is_switched_gets_the_class_of_the_present_level(
    scripts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CRUX_DISABLE", "CRUX_TUNING", "CRUX_ROCE_ECN"):
        monkeypatch.delenv(variable, raising=False)
    level = [DSCP]
    monkeypatch.setattr(AGENT, "background", _plans(lambda: level[0]))
    monkeypatch.setattr(nccl, "process_ecn", lambda: Ecn(2, "the test says so"))
    monkeypatch.setattr(nccl.LABELS, "give", lambda owner, ecn: None)
    script = options()
    if scripts is not None:
        script.config.traffic_class = scripts
    classes = []
    current = ProcessGroupNCCL(None, 0, 2, inner_backends.with_nccl_class("nccl", script, "0"))
    for level[0] in (DSCP, 8, 56):
        current = like_nccl(current, dist.HashStore(), timedelta(seconds=1), script)
        classes.append(current.options.config.traffic_class)
    assert classes == ([scripts] * 3 if scripts else [DSCP << 2 | 2, 8 << 2 | 2, 56 << 2 | 2])
    assert script.config.traffic_class == (nccl.UNDEFINED if scripts is None else scripts)


class ProcessGroupNCCL2(ProcessGroupNCCL):
    """As torch has it that connects when it is made."""

    bound_device_id = torch.device("cuda", 0)

    def __init__(self, store: Any, rank: int, size: int, options: Any, device: Any = None) -> None:
        super().__init__(store, rank, size, options)

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout


def test_a_communicator_is_made_without_blocking() -> None:
    script = options()
    current = ProcessGroupNCCL2(None, 0, 2, script)
    made = like_nccl(current, dist.HashStore(), timedelta(seconds=1), script)
    assert made.options.config.blocking == 0
    assert script.config.blocking != 0


def test_a_communicator_is_made_where_the_last_one_would_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([100, 60, 40, 39])
    device = torch.device("cpu", 0)
    monkeypatch.setattr(steps, "_free_bytes", lambda device: next(free))
    monkeypatch.setattr(steps, "_taken", {})
    made = FakeProcessGroup._create_internal(0, 1)
    assert steps.make_connected(lambda: made, device, 60.0) is made
    steps.require_room(device)
    with pytest.raises(CruxError, match="39 bytes are free on cpu:0; the last"):
        steps.require_room(device)


LEAVES_A_CALL = """
import time
import torch
from crux_torch.backend.handover import device
from crux_torch.errors import CruxError

def call():
    time.sleep(1.0)
    print("returned", flush=True)

try:
    device.within(0.01, call, torch.device("cpu"), "it did not return")
except CruxError as error:
    print(error, flush=True)
"""


def test_a_process_waits_at_its_end_for_a_call_that_was_left() -> None:
    """One that returned while Python ends would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_A_CALL], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["it did not return in 0.01 s", "returned"], done.stderr
    assert done.returncode == 0


COMES_BACK_TOO_LATE = """
import os
import sys
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from crux_torch.backend.handover import device
from crux_torch.errors import CruxError

device.END_S = 0.1
store = dist.HashStore()
store.set_timeout(timedelta(seconds=2))

class Flushed:
    closed = False
    ended = False

    def flush(self):
        # Python also does so once it has begun to end.
        if sys.is_finalizing() and not self.ended:
            self.ended = True
            time.sleep(4.0)
            os.write(1, b"ended\\n")

try:
    device.within(0.01, lambda: store.get("none"), torch.device("cpu"), "it did not return")
except CruxError as error:
    print(error, flush=True)
sys.stdout = Flushed()
raise SystemExit(3)
"""


def test_a_call_that_comes_back_while_python_ends_does_not_abort_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMES_BACK_TOO_LATE], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["it did not return in 0.01 s", "ended"], done.stderr
    assert done.returncode == 3, done.stderr
