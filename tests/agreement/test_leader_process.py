"""What is large in the store is parsed and planned in a process of its own, never in a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control_fakes import FakeClock, by_name, record, until
from loopback import free_port
from networks import LEAF_SPINE
from seen_fabric import Host, fragment
from store_server import ServerThread
from training_job import alive

from crux_torch.agreement import registry
from crux_torch.agreement.bounded_leader import (
    MAX_BYTES,
    MAX_PLACED_SIZE,
    MAX_SEEN_BYTES,
    BoundedLeader,
    SmallOnly,
)
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.leader_process import MAX_PAUSE_S, MODULE, START_S, Begin, LeaderApart
from crux_torch.agreement.outcome import Outcome
from crux_torch.agreement.records import JobRecord, PlanEntry
from crux_torch.agreement.registry import PlanState, View
from crux_torch.errors import StoreError, StoreTooLarge
from crux_torch.network.loaders import parse_yaml
from crux_torch.store import client as client_module
from crux_torch.store.endpoint import ProcessConnector, TcpConnector

LEASE_S = 60.0
#: A topology of a few bytes, and one that grows to any size.
SMALL = b"version: 1\nbuilder: testbed\n"
FIELDS = ("state", "store", "job", "jobs", "epoch")


def begin_of(store: str, job: JobRecord, **changes: Any) -> Begin:
    values: dict[str, Any] = {
        "store": store,
        "store_secret": "",
        "store_group": "",
        "cluster": "c",
        "record": job,
        "published": None,
        "policy": "crux-paper",
        "max_slowdown": 3.0,
        "guard": False,
        "lease_s": LEASE_S,
        "plan_valid_s": 600.0,
        "log_level": 20,
    }
    return Begin(**{**values, **changes})


class Rank:
    """A rank's leader, as agent/join.py makes it."""

    def __init__(
        self, port: int, job: JobRecord, *, published: bytes | None = None, **changes: Any
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{port}"
        own = parse_yaml(published.decode()) if published is not None else None
        self.store = client_module.StoreClient(
            TcpConnector("127.0.0.1", port), timeout_s=60.0, limit_bytes=MAX_BYTES
        )
        here = Leader(
            self.store,
            "c",
            job,
            by_name,
            published=published,
            in_thread=True,
            lease_s=LEASE_S,
            poll_s=0.0,
            debounce_s=0.0,
            plan_valid_s=600.0,
            check=SmallOnly(published, own),
        )

        def apart(job: JobRecord, outcome: Outcome) -> LeaderApart:
            begin = begin_of(self.endpoint, job, published=published, **changes)
            starter = ProcessConnector(self.endpoint, module=MODULE, start_s=START_S)
            return LeaderApart(begin, starter, outcome, lambda since_ns: [])

        self.leader = BoundedLeader(here, apart)

    @property
    def pid(self) -> int | None:
        pid: int | None = self.leader.status()["process"]
        return pid

    def ticks_until(self, condition: Callable[[], bool], what: str) -> None:
        def ticked() -> bool:
            self.leader.tick()
            return condition()

        until(ticked, what=what)

    def close(self) -> None:
        self.leader.close()
        self.store.close()


@pytest.fixture
def running() -> Iterator[ServerThread]:
    with ServerThread() as thread:
        yield thread


@pytest.fixture
def start(running: ServerThread) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(name: str = "a", **options: Any) -> Rank:
        ranks.append(Rank(running.port, record(name), **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def has_plan(rank: Rank) -> Callable[[], bool]:
    return lambda: rank.leader.outcome.entry is not None


def fill(running: ServerThread, count: int, size: int) -> None:
    """Put ``count`` records of other jobs of about ``size`` bytes into the store."""
    client = running.client()
    for n in range(count):
        padded = record(f"other-{n:04}", hosts=tuple(f"h{i}" * 20 for i in range(size // 44)))
        client.put(f"crux/c/jobs/{padded.job}", msgspec.json.encode(padded))
    client.close()


class Parsed:
    """Notes what this process parses of the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.topologies: list[bytes] = []
        unpack, decode = client_module.unpack, registry.decode

        def counted_unpack(frame: bytes, *about: Any) -> Any:
            self.sizes.append(len(frame))
            return unpack(frame, *about)

        def counted_decode(kind: Any, raw: bytes, where: str) -> Any:
            self.sizes.append(len(raw))
            return decode(kind, raw, where)

        monkeypatch.setattr(client_module, "unpack", counted_unpack)
        monkeypatch.setattr(registry, "decode", counted_decode)

        def never(text: str, *_: Any) -> Any:
            self.topologies.append(text.encode())
            raise AssertionError("a rank parses no topology of the store")

        monkeypatch.setattr("crux_torch.agreement.inputs.parse_yaml", never)


def test_what_is_small_is_planned_here(start: Callable[..., Rank]) -> None:
    rank = start(published=LEAF_SPINE.encode())
    rank.ticks_until(has_plan(rank), "a plan")
    assert rank.pid is None


def test_what_jobs_saw_is_joined_here_only_while_it_is_small() -> None:
    check = SmallOnly(None, None)
    view = View((), None, PlanState(None, None), fragments={"a": bytes(MAX_SEEN_BYTES)})
    check(view)
    with pytest.raises(StoreTooLarge, match="16385 bytes of what jobs saw of the network"):
        check(replace(view, fragments={"a": bytes(MAX_SEEN_BYTES), "b": b"x"}))
    many = tuple(record(f"j{n}") for n in range(MAX_PLACED_SIZE))
    check(replace(view, jobs=many, fragments={}))
    with pytest.raises(StoreTooLarge, match="jobs and flows"):
        check(replace(view, jobs=many))


@pytest.mark.slow
def test_a_process_apart_goes_on_telling_what_its_job_saw(
    running: ServerThread, start: Callable[..., Rank]
) -> None:
    rank = start()
    rank.ticks_until(has_plan(rank), "a plan")
    other = running.client()
    for turn, moment in enumerate(("before", "after")):
        told = msgspec.json.encode(fragment([Host(0, turn), Host(1, turn)]))
        rank.leader.tell_network(told)
        if moment == "before":
            fill(running, 90, 1000)
            rank.ticks_until(lambda: rank.pid is not None, "the process")
        rank.ticks_until(
            lambda told=told: other.get("crux/c/fragments/a") == told, f"the fragment {moment}"
        )
    other.close()


@pytest.mark.slow
def test_large_contents_are_parsed_and_planned_apart(
    running: ServerThread, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start()
    rank.ticks_until(has_plan(rank), "a plan")
    epoch = rank.leader.outcome.epoch
    fill(running, 90, 1000)
    parsed = Parsed(monkeypatch)
    rank.ticks_until(lambda: rank.leader.outcome.epoch > epoch, "a plan of all jobs")
    assert rank.pid is not None
    # It has the lowest priority and no torch, and holds none of this process's descriptors.
    about = Path(f"/proc/{rank.pid}")
    assert os.getpriority(os.PRIO_PROCESS, rank.pid) == 19
    assert "libtorch" not in (about / "maps").read_text()
    assert os.getsid(rank.pid) == rank.pid
    # What it published before is there still, and it learns of changes.
    other = running.client()
    rank.leader.update(state="profiling")
    rank.ticks_until(
        lambda: json.loads(other.get("crux/c/jobs/a") or b"{}").get("state") == "profiling",
        "the changed record",
    )
    other.close()
    assert max(parsed.sizes) <= MAX_BYTES + 8192
    assert not parsed.topologies
    rank.ticks_until(lambda: rank.leader.status().get("epoch") is not None, "the status")
    assert len(rank.leader.status()["jobs"]) == 91


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw", [SMALL, b"junk: [", LEAF_SPINE.encode()], ids=["builder", "junk", "other"]
)
def test_a_topology_that_is_not_the_jobs_own_is_never_parsed_in_a_rank(
    running: ServerThread, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    rank = start()
    rank.ticks_until(has_plan(rank), "a plan")
    parsed = Parsed(monkeypatch)
    client = running.client()
    client.put("crux/c/topology", raw)
    epoch = rank.leader.outcome.epoch
    rank.ticks_until(lambda: rank.leader.outcome.epoch > epoch, "a plan with the topology")
    assert rank.pid is not None
    for n in range(5):
        client.put("crux/c/topology", raw + b"\n# %d\n" % n)
        rank.leader.tick()
    client.close()
    assert not parsed.topologies


@pytest.mark.slow
def test_a_process_that_dies_is_started_again_and_one_that_stops_is_ended(
    running: ServerThread, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(running, 90, 1000)
    rank = start()
    for number in (signal.SIGKILL, signal.SIGSTOP):
        rank.ticks_until(lambda: rank.leader.status().get("epoch") is not None, "a plan")
        before = rank.pid
        assert before is not None
        os.kill(before, number)
        with monkeypatch.context() as patch:
            # Only for the one that does not go on: on a busy machine another one takes long.
            patch.setattr("crux_torch.agreement.leader_process.BUDGET_S", 3.0)
            rank.ticks_until(lambda b=before: rank.pid not in (None, b), "another process")
        assert not alive(before)
        rank.ticks_until(lambda: rank.leader.store_state == "ok", "its answer")


class NoProcess:
    """A machine where no process can be started."""

    pid = None
    attempts = 0

    def connect(self, timeout_s: float) -> Any:
        self.attempts += 1
        raise StoreError("no process can be started")

    def close(self) -> None:
        pass


def test_without_a_process_there_is_no_plan_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, starter = FakeClock(), NoProcess()
    entry = PlanEntry(job="a", level=3, priority=1.0, intensity=1.0, correction=1.0)
    begin = begin_of("tcp://127.0.0.1:1", record("a"), plan_valid_s=15.0)
    leader = LeaderApart(begin, starter, Outcome(4, entry), lambda _: [], clock=clock)
    for _ in range(20 * 60):
        leader.tick()
        if clock() - 1000.0 < 15.0:
            assert leader.outcome.entry is entry  # what held until now ends with its time
        else:
            assert leader.outcome == Outcome()
        clock.advance(1.0)
    assert starter.attempts <= 8 + 1200 / MAX_PAUSE_S
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "goes on without a plan" in caplog.text
    assert "no process can be started" in leader.store_state
    leader.close()


def test_the_process_ends_with_its_rank() -> None:
    code = (
        "import sys, time\n"
        "from crux_torch.agreement.leader_process import MODULE\n"
        "from crux_torch.errors import StoreError\n"
        "from crux_torch.store.endpoint import ProcessConnector\n"
        f"starter = ProcessConnector('tcp://127.0.0.1:{free_port()}', module=MODULE)\n"
        "while True:\n"
        "    try: held = starter.connect(60.0); break\n"
        "    except StoreError: pass\n"
        "print(starter.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    # Even while it computes, and does not look.
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pid), what="its end")


@pytest.mark.slow
def test_no_content_of_the_store_holds_the_gil(
    running: ServerThread, start: Callable[..., Rank]
) -> None:
    """The CPU time of a rank's leader stays small while the contents change all the time."""
    rank = start(published=LEAF_SPINE.encode())
    rank.ticks_until(has_plan(rank), "a plan")
    stop = threading.Event()
    began_s, longest_s = time.monotonic(), 0.0

    def attack() -> None:
        client, n = running.client(), 0
        try:
            while not stop.is_set():
                n += 1
                large = "".join(f"  n{i}-{n}: tor\n" for i in range(20_000))
                client.put("crux/c/topology", b"version: 1\nswitches:\n" + large.encode())
                for i in range(20):
                    client.put(f"crux/c/jobs/{i}", b"[" * 50_000 + b"%d" % n)
                stop.wait(0.3)
        except StoreError:
            pass  # the store's own limit
        client.close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    total_s, ticks = 0.0, 0
    while time.monotonic() - began_s < 6.0:
        before_s = time.thread_time()
        rank.leader.tick()
        longest_s = max(longest_s, time.thread_time() - before_s)
        total_s += time.thread_time() - before_s
        ticks += 1
        stop.wait(0.05)
    stop.set()
    attacker.join()
    assert rank.pid is not None
    assert ticks > 50
    assert longest_s < 0.1, "one parse of what was there takes longer"
    assert total_s < 0.05 * 6.0
