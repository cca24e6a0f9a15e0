"""Leader and ranks of one job over the job's own store, of every kind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from control_fakes import FakeClock, until
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from crux_torch.agreement.job_channel import MAX_SAMPLE_BYTES, JobChannel

WORLD = 3


@pytest.fixture(params=["tcp", "tcp+prefixes", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "hash":
        yield HashStore()
    elif request.param == "file":
        yield FileStore(str(tmp_path / "store"), WORLD)
    else:
        tcp = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        nested = PrefixStore("default_pg", PrefixStore("/worker/attempt_0", tcp))
        yield tcp if request.param == "tcp" else nested


@pytest.fixture
def channels(store: Store) -> Iterator[list[JobChannel]]:
    made = [JobChannel(store, rank, WORLD, timeout_s=30.0) for rank in range(WORLD)]
    yield made
    for channel in made:
        channel.close()


def test_samples_reach_the_leader_and_missing_ranks_are_named(channels: list[JobChannel]) -> None:
    assert channels[0].collect() == {}
    assert channels[0].put_sample(b"leader")
    assert channels[2].put_sample(b"\x00\xff")
    assert channels[0].collect() == {0: b"leader", 2: b"\x00\xff"}
    channels[2].put_sample(b"newer")
    channels[1].put_sample(b"")
    assert channels[0].collect() == {0: b"leader", 1: b"", 2: b"newer"}
    assert channels[0].error is None


def test_an_order_reaches_every_rank_in_place_of_the_last(channels: list[JobChannel]) -> None:
    leader, *others = channels
    assert [channel.order() for channel in others] == [None, None]
    for order in (b"one", b"one", b"", b"two"):
        assert leader.publish(order)
        assert [channel.order() for channel in channels] == [order] * 3


def test_bounds(channels: list[JobChannel]) -> None:
    with pytest.raises(ValueError, match="limit"):
        channels[0].put_sample(b"x" * (MAX_SAMPLE_BYTES + 1))
    with pytest.raises(ValueError, match="limit"):
        channels[0].publish(b"x" * (1 << 21))
    with pytest.raises(ValueError, match="rank 3 of 3"):
        JobChannel(HashStore(), 3, 3)


def test_an_oversize_order_is_ignored() -> None:
    store = HashStore()
    channel = JobChannel(store, 0, 1)
    store.set("crux/order", b"x" * (MAX_SAMPLE_BYTES + 1))  # type: ignore[arg-type]
    assert channel.order() is None


@pytest.mark.slow
def test_the_training_threads_wait_does_not_hold_up_the_channel() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    client = TCPStore(
        "127.0.0.1", server.port, None, False, timedelta(seconds=60), wait_for_workers=False
    )
    training = PrefixStore("p", client)
    channel = JobChannel(training, 0, 1, timeout_s=30.0)
    waiting = threading.Thread(target=lambda: training.get("slow"), daemon=True)
    waiting.start()
    assert channel.put_sample(b"while it waits")
    assert channel.collect() == {0: b"while it waits"}
    assert waiting.is_alive()
    PrefixStore("p", server).set("slow", "now")
    waiting.join(60)
    assert not waiting.is_alive()
    channel.close()


def test_attempts_of_one_job_do_not_see_each_other() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    first = JobChannel(PrefixStore("attempt_0", server), 0, 1, timeout_s=30.0)
    second = JobChannel(PrefixStore("attempt_1", server), 0, 1, timeout_s=30.0)
    first.put_sample(b"old")
    assert second.collect() == {}
    first.close()
    second.close()


def test_a_store_that_died_gives_nothing_and_raises_nothing(
    caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    channel = JobChannel(server, 0, 2, timeout_s=30.0, clock=clock)
    assert channel.put_sample(b"x")
    del server

    def dead() -> bool:
        clock.advance(60.0)
        return not channel.put_sample(b"y")

    until(dead, what="the server's end is noticed")
    # A store that ends with its job, a little before this rank, is nothing to warn of.
    assert caplog.text == ""
    clock.advance(60.0)
    assert channel.collect() == {}
    assert channel.order() is None
    assert not channel.publish(b"z")
    assert channel.error is not None
    assert caplog.text.count("can't reach its job's leader") == 1
    channel.close()
    assert not channel.put_sample(b"closed")
