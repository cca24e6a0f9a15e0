"""One rank's pipeline in its thread against a leader, stores and settings that misbehave."""

import json
import logging
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import msgspec
import pytest
import torch
from control_fakes import profile, until
from dscp_maps import MARKS
from loopback import free_port
from steered_rank import Rank, route
from torch.distributed import HashStore

from crux_torch import agent as agents
from crux_torch.agent import BackgroundThread, follower
from crux_torch.agent import pipeline as pipelines
from crux_torch.agent.orders import Order
from crux_torch.agent.pipeline import Pipeline
from crux_torch.agreement.job_channel import JobChannel
from crux_torch.agreement.records import MAX_RECORD_BYTES
from crux_torch.backend.tcp_sockets import Ownership
from crux_torch.measure.profile import MAX_FLOWS, HostFlow
from crux_torch.settings import Settings

BOUND_S = 60.0
QUICK = {"store": "none", "job": "j", "start_s": 0.1, "tick_s": 0.01}
QUICK |= {"profile_s": 0.5, "warmup_iterations": 1}


class Silent:
    """A recorder that never sees an operation."""

    recorded = dropped = captured = 0
    capacity = 8

    def drain(self, _limit):
        return b""

    def groups(self):
        return []


def in_background(store, settings, rank=0, world=1):
    """The thread of one rank, not started."""

    def make(device, marks, stop):
        return Pipeline(
            settings, rank=rank, world_size=world, store=store, recorder=Silent(),
            ownership=Ownership(), device=device, marks=marks, stop=stop,
        )  # fmt: skip

    return BackgroundThread(make, settings, rank)


@pytest.fixture
def store():
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


@pytest.fixture
def start(store, monkeypatch):
    monkeypatch.setattr(pipelines, "ORDER_POLL_S", 0.02)
    running = []

    def launch(rank=0, world=1, **settings):
        background = in_background(store, Settings(**{**QUICK, **settings}), rank, world)
        running.append(background)
        background.start()
        until(lambda: background.pipeline is not None, what="the pipeline")
        background.pipeline.background = background
        return background.pipeline

    yield launch
    for background in running:
        background.stop(10.0)
        assert not background.active


class Led:
    """A rank of two, and the channel of its leader, which the test is."""

    def __init__(self, store, start):
        self.leader = JobChannel(store, 0, 2)
        self.agent = start(rank=1, world=2)

    def says(self, **changes):
        self.leader.publish(order(**changes).to_json())

    def has_level(self, level):
        until(lambda: self.agent.status()["applied"]["level"] == level, what=f"level {level}")

    def looks_for(self, seconds):
        began = self.agent._order_at_s
        until(lambda: self.agent._order_at_s > began + seconds, what="more looks")


@pytest.fixture
def led(store, start):
    return Led(store, start)


def order(**changes):
    return Order(
        **{"incarnation": "i", "number": 1, "level": 5, "marks": MARKS, "valid_s": 30.0, **changes}
    )


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_orders_of_an_earlier_world_give_way_to_the_new_leader(start, store):
    earlier = order(number=57, incarnation="earlier", measuring=True, measurement=4)
    JobChannel(store, 0, 1).publish(earlier.to_json())
    agent = start()
    until(lambda: (agent.status()["order"] or {}).get("number", 0) > 57, what="the new orders")
    assert agent.status()["order"]["incarnation"] != "earlier"
    assert agent.status()["errors"] == {}


def test_a_rank_answers_the_measurement_of_a_new_world_though_its_number_is_old(led):
    for turn, incarnation in ((1, "first"), (2, "second")):
        led.says(number=turn, incarnation=incarnation, measuring=True, measurement=1)
        wanted = f"{incarnation} 1\n".encode()
        until(lambda wanted=wanted: led.leader.collect().get(1) == wanted, what=str(wanted))


def test_a_measurement_is_answered_though_the_leader_fell_silent_meanwhile(led):
    led.says(measuring=True, measurement=1, valid_s=0.1)
    until(lambda: 1 in led.leader.collect(), what="the answer")
    assert led.agent.status()["errors"] == {}


def test_silence_takes_the_class_back_and_a_new_order_sets_it_again(led, caplog):
    led.says(valid_s=0.3, profile=profile())
    led.has_level(5)
    led.has_level(None)
    # What lies in the store is still the order that has ended: it must not count again.
    led.looks_for(0.5)
    assert led.agent.status()["applied"]["level"] is None
    assert led.agent.status()["plan"] is None
    assert led.agent.profile() == profile()
    assert len(warnings(caplog)) == 1
    led.says(number=2, level=3)
    led.has_level(3)
    assert led.agent.status()["applied"]["dscp"] == 24


def test_routes_are_followed_and_taken_back_when_the_leader_falls_silent(
    start, store, monkeypatch, caplog
):
    fakes = Rank()
    monkeypatch.setattr(follower, "Steering", lambda *_, **__: fakes.steering)
    led = Led(store, start)
    led.says(valid_s=0.5, routes=(route(1),), generation=7)
    until(lambda: fakes.groups.requests == [7], what="the handover")
    (told,) = fakes.groups.routes_then[0]
    assert (told.destination, told.dscp) == ("10.1.0.2", 40)
    assert json.loads(json.dumps(led.agent.status()))["paths"]["generation"] == 7
    until(lambda: fakes.transport.routes == (), what="the end of the routes")
    assert fakes.groups.requests == [7]
    assert len(warnings(caplog)) == 1
    led.says(number=2, routes=(route(1),), generation=7)
    until(lambda: len(fakes.transport.routes) == 1, what="the routes of the next order")
    assert fakes.groups.requests == [7]


def test_malformed_orders_are_ignored_with_one_warning(led, caplog):
    led.says()
    led.has_level(5)
    for raw in (b"\xff", b"{}", b"[" * 1000, order().to_json()[:-9]):
        led.leader.publish(raw)
        led.looks_for(0.05)
    assert led.agent.status()["applied"]["level"] == 5
    assert len(warnings(caplog)) == 1
    led.says(number=9, level=2)
    led.has_level(2)


def test_an_order_that_is_older_than_the_last_is_ignored(led):
    led.says(number=9)
    led.has_level(5)
    led.says(number=8, level=2, incarnation="earlier")
    led.looks_for(0.05)
    assert led.agent.status()["order"]["number"] == 9


def test_an_order_that_is_too_long_goes_without_the_profile(start, store):
    agent = start()
    names = [f"{n:0200d}" for n in range(MAX_FLOWS)]
    large = profile(flows=tuple(HostFlow(name, name[::-1], 1.0) for name in names))
    until(lambda: agent.status()["order"] is not None, what="an order")
    order = msgspec.convert(agent.status()["order"], Order)
    long = msgspec.structs.replace(
        order, number=order.number + 1000, level=4, marks=MARKS, profile=large
    )
    assert len(long.to_json()) > MAX_RECORD_BYTES
    assert agent.publish(long)
    until(lambda: agent.status()["applied"]["level"] == 4, what="the long order")


def test_a_job_without_whole_iterations_says_so_once(start, caplog):
    agent = start()
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step_until_measured():
        parameter.grad = torch.ones(2)
        optimizer.step()
        told = agent.status()["leader"] or {}
        return (told.get("phase"), told.get("measurements")) == ("warming", 1)

    until(step_until_measured, what="the end of the measurement")
    assert len(warnings(caplog)) == 1
    assert agent.profile() is None


@pytest.mark.parametrize("broken", ["policy", "topology", "no topology"])
def test_what_cannot_be_used_is_left_out_with_one_warning(broken, start, caplog, tmp_path):
    folder = tmp_path / "fabric.yaml"
    folder.write_text("links: [not, a, topology")
    settings = {
        "policy": {"policy": "nonesuch", "store": f"tcp://127.0.0.1:{free_port()}"},
        "topology": {"topology": str(folder)},
        "no topology": {"topology": str(tmp_path / "absent.yaml")},
    }
    agent = start(**settings[broken])
    until(lambda: agent.status()["order"] is not None, what="orders all the same")
    assert len(warnings(caplog)) == 1
    assert agent.status()["errors"] == {}


def test_it_stops_though_the_store_hangs(start):
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = start(store=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        until(lambda: agent.status()["leader"] is not None, what="the leader")
        agent.background.stop(10.0)
        assert not agent.background.active
        agent.background.stop()


def test_an_error_in_one_step_neither_ends_the_thread_nor_floods(start, monkeypatch, caplog):
    failures = iter(range(1_000_000))

    def fail(self):
        raise RuntimeError(f"failure {next(failures)}")

    monkeypatch.setattr(Pipeline, "_measure", fail)
    agent = start()
    until(lambda: next(failures) > 20, what="many ticks")
    assert agent.background.active
    assert agent.status()["order"] is not None
    assert len(warnings(caplog)) == 1
    assert "measure" in agent.status()["errors"]


def test_status_is_json_before_a_process_group_and_with_settings_that_cannot_be_used(monkeypatch):
    import crux_torch

    told = json.loads(json.dumps(crux_torch.status()))
    assert told["active"] is False
    assert told["why_not"]
    assert crux_torch.profile() is None
    monkeypatch.setenv("CRUX_LEVELS", "many")
    assert "CRUX_LEVELS" in crux_torch.status()["why_not"]


def test_nothing_is_left_after_stop(start):
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    agent = start()
    assert len(optimizer._global_optimizer_pre_hooks) == before + 1
    agent.background.stop(10.0)
    assert len(optimizer._global_optimizer_pre_hooks) == before
    assert "crux" not in {thread.name for thread in threading.enumerate()}


def test_a_world_ends_at_once_and_a_process_waits_for_a_bounded_time(store, start, monkeypatch):
    background = start().background
    goes_on, waited_s = threading.Event(), []
    monkeypatch.setattr(background.pipeline, "_close", lambda: goes_on.wait(BOUND_S))
    join = background._thread.join
    monkeypatch.setattr(background._thread, "join", waited_s.append)
    background.end()
    assert background.active
    assert not waited_s
    background.stop()
    assert waited_s == [agents.LAST_S]
    goes_on.set()
    monkeypatch.setattr(background._thread, "join", join)
    background.stop(BOUND_S)
    assert not background.active


@pytest.mark.parametrize(
    ("iterations", "timing", "begins"),
    [
        (agents.START_ITERATIONS - 1, "measuring", False),
        (agents.START_ITERATIONS, "measuring", True),
        (0, "always", True),
    ],
)
def test_a_job_that_ends_early_makes_no_pipeline(store, iterations, timing, begins):
    settings = Settings(**{**QUICK, "start_s": 600.0, "timing": timing})
    background = in_background(store, settings)
    background.marks.total = iterations
    background.start()
    if begins:
        until(lambda: background.pipeline is not None, what="the pipeline")
    background.stop(BOUND_S)
    assert not background.active
    assert (background.pipeline is not None) == begins


def test_a_rank_that_follows_does_not_import_what_leads():
    program = (
        "import sys, torch, crux_torch.agent.pipeline\n"
        "print(*{'crux_torch.agent.job_controller', 'crux_torch.schedule.arrays', 'scipy', 'yaml'}"
        " & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
