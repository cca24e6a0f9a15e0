"""Crux in torch.profiler, TensorBoard and torch's debug server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from control_fakes import FakeClock
from pace_world import SECOND, Marks, World
from programs import python

import crux_torch
from crux_torch.agent.orders import Order, Pace
from crux_torch.agent.pace import PaceKeeper
from crux_torch.agent.training_tools import PlanSpans, TensorBoard, curves
from crux_torch.errors import CruxError


def order(epoch: int, level: int | None = 2) -> Order:
    return Order(incarnation="i", number=1, valid_s=9.0, plan_epoch=epoch, level=level)


def names(profiler: Any) -> list[str]:
    return [event.name for event in profiler.events() if event.name.startswith("crux")]


def test_a_trace_shows_the_plan_at_its_begin_and_each_change() -> None:
    now: list[Order | None] = [order(3)]
    spans = PlanSpans(lambda: now[0])
    spans.on_mark(0)
    with torch.profiler.profile() as first:
        spans.on_mark(1)
        spans.on_mark(2)
        now[0] = order(4, level=None)
        spans.on_mark(3)
    assert names(first) == [
        "crux: plan 3, level 2, paths 0",
        "crux: plan 4, level network's default, paths 0",
    ]
    spans.on_mark(4)
    now[0] = None
    with torch.profiler.profile() as second:
        spans.on_mark(5)
    assert names(second) == ["crux: no plan"]


def test_a_trace_shows_how_long_a_grid_holds_an_iteration() -> None:
    world = World()
    marks = Marks()
    keeper = PaceKeeper(marks, sleep=world.sleep, clock_ns=world.host(0))  # type: ignore[arg-type]
    keeper.install()
    marks.mark(0)
    keeper.follow(Pace(mark=1, lead_s=0.0, grid_s=1.0))
    world.now_ns = SECOND // 2
    with torch.profiler.profile() as profiler:
        marks.mark(SECOND // 2)
    assert names(profiler) == ["crux: wait for the grid"]


class Writer:
    """A SummaryWriter that keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append((text_string, global_step))


PROFILE = {
    "period_s": 2.0,
    "compute_s": 1.5,
    "flops": 6e12,
    "t_s": 0.5,
    "intensity": 1.2e13,
    "measured_alone": True,
}


def test_curves_leave_out_what_is_not_known() -> None:
    assert curves({"profile": None, "order": None}) == {}
    assert curves({"profile": PROFILE, "order": {"level": 3, "plan_epoch": 7}}) == {
        "alone_s": 2.0,
        "period_s": 2.0,
        "W_flops": 6e12,
        "t_s": 0.5,
        "intensity_flops_per_s": 1.2e13,
        "level": 3.0,
        "plan_epoch": 7.0,
        "exposed_share": 0.25,
    }


def test_tensorboard_gets_a_value_every_so_often_and_each_plan_once() -> None:
    clock, writer = FakeClock(), Writer()
    status: dict[str, Any] = {"iterations": 0, "profile": PROFILE, "order": None}
    board = TensorBoard(writer, lambda: status, every_s=4.0, clock=clock)
    for step in range(1, 13):
        clock.advance(1.0)
        status["iterations"] = step
        if step == 6:
            status["order"] = {"level": 3, "plan_epoch": 7}
        board.on_step()
    times = [(value, step) for tag, value, step in writer.scalars if tag == "crux/step_s"]
    assert times == [(1.0, 4), (1.0, 8), (1.0, 12)]
    assert [(tag, step) for tag, _, step in writer.scalars if tag == "crux/level"] == [
        ("crux/level", 8),
        ("crux/level", 12),
    ]
    assert writer.texts == [("plan 7, level 3", 8)]


def test_a_negative_pause_is_refused() -> None:
    with pytest.raises(CruxError, match="every_s is -1"):
        crux_torch.tensorboard(Writer(), every_s=-1)


BOARD = """
import sys, torch, torch.distributed as dist, crux_torch
from torch.utils.tensorboard import SummaryWriter
crux_torch.attach()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with SummaryWriter(sys.argv[1]) as writer:
    board = crux_torch.tensorboard(writer, every_s=0, step=lambda: 41)
    while board._iterations_then < 3:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    board.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_real_writer_has_the_step_time(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    python(BOARD, str(tmp_path), CRUX_TUNING="start_s=0.1")
    board = events.EventAccumulator(str(tmp_path)).Reload()
    values = board.Scalars("crux/step_s")
    assert values
    assert all(value.value > 0 and value.step == 41 for value in values)


SERVER = """
import os, socket, time, urllib.request, torch.distributed as dist, crux_torch
from torch.distributed.debug import start_debug_server, stop_debug_server
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
crux_torch.attach()
dist.init_process_group("gloo")
start_debug_server(port=port, handlers=[crux_torch.debug_handler()])
while True:
    try:
        page = urllib.request.urlopen(f"http://localhost:{port}/crux").read().decode()
        break
    except ConnectionError:
        time.sleep(0.1)
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ConnectionError):
            raise
        time.sleep(0.1)
stop_debug_server()
dist.destroy_process_group()
print(page)
"""


@pytest.mark.slow
def test_the_debug_server_shows_the_status_of_a_rank() -> None:
    pytest.importorskip("torch.distributed.debug")
    pytest.importorskip("requests")
    page = python(SERVER)
    begin, end = page.index("<pre>") + len("<pre>"), page.index("</pre>")
    status = json.loads(page[begin:end].replace("&#34;", '"').replace("&#39;", "'"))
    assert status["attached"] is True
    assert status["recorder"]["groups"] >= 1
    assert "Rank 0" in page
