"""What each connection has sent, and which ones can be limited."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verbs_fakes import Fakes, build

from crux_torch.apply.transport import Connection
from crux_torch.apply.wire import READY_TO_SEND, WORD_BYTES, Wire


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return build(tmp_path_factory.mktemp("fakes"))


def connection(id: int, **more: Any) -> Connection:
    zeros = dict.fromkeys(Connection.__dataclass_fields__, 0)
    texts = dict.fromkeys(("owner", "device", "local", "peer", "via"), "")
    return Connection(**{**zeros, **texts, "id": id, "kind": "tcp", "how": "untouched", **more})


def queue_pair(id: int, posted: int = 0, state: int = READY_TO_SEND) -> Connection:
    ends = {"device": "rxe0", "peer": "10.0.0.2"}
    return connection(id, kind="qp", state=state, bytes_sent=posted, **ends)


def wire_of(connections: list[Connection], sysfs: Path) -> Wire:
    ownership = SimpleNamespace(owned=lambda: [SimpleNamespace(inode=7)])
    transport = SimpleNamespace(connections=lambda: connections)
    return Wire(ownership, SimpleNamespace(), lambda: transport, sysfs=sysfs)


def port(sysfs: Path, sent: int, received: int, device: str = "rxe0") -> None:
    counters = sysfs / "class" / "infiniband" / device / "ports" / "1" / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters / "port_xmit_data").write_text(f"{sent // WORD_BYTES}\n")
    (counters / "port_rcv_data").write_text(f"{received // WORD_BYTES}\n")


def sent(wire: Wire) -> dict[tuple[str, int], int]:
    return {(c.kind, c.id): c.bytes_sent for c in wire.connections()}


def test_a_socket_that_is_not_the_jobs_is_left_out(tmp_path: Path) -> None:
    assert sent(wire_of([connection(7), connection(8)], tmp_path)) == {("tcp", 7): 0}


def test_queue_pairs_count_what_was_posted_to_each(tmp_path: Path) -> None:
    port(tmp_path, 8000, 4000)
    wire = wire_of([queue_pair(1, posted=300), queue_pair(2), queue_pair(3, state=1)], tmp_path)
    assert sent(wire) == {("qp", 1): 300, ("qp", 2): 0}


def test_without_posts_the_port_counts_for_its_queue_pairs(tmp_path: Path) -> None:
    port(tmp_path, 8000, 4000)
    pairs = [queue_pair(1), queue_pair(2)]
    wire = wire_of(pairs, tmp_path)
    assert sent(wire) == {("qp", 1): 4000, ("qp", 2): 4000}
    assert sum(c.bytes_received for c in wire.connections()) == 4000
    # From the first post on, only posts count.
    pairs[0] = queue_pair(1, posted=10)
    assert sent(wire) == {("qp", 1): 10, ("qp", 2): 0}
    pairs[0] = queue_pair(4)
    assert sent(wire) == {("qp", 4): 0, ("qp", 2): 0}


def test_live_queue_pairs_are_limited_and_let_go(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        from types import SimpleNamespace
        from crux_torch.apply.wire import Wire
        sockets = SimpleNamespace(apply_rates=lambda rates: None)
        wire = Wire(SimpleNamespace(owned=lambda: []), sockets)
        mlx5.fake_mlx5_rate.restype = ctypes.c_uint32
        NEVER = 2**32 - 1
        def rates():
            return [mlx5.fake_mlx5_rate(client.client_number(end)) for end in (0, 1)]
        assert client.client_pair(0)
        assert client.client_post(0, 2, (ctypes.c_uint32 * 1)(5000), 1) == 0
        assert [c.bytes_sent for c in wire.connections()] == [5000, 0]
        a, b = [c.id for c in QueuePairs().list()]
        assert wire.limit({("qp", a): 1_000_000}) == "" and rates() == [8, NEVER]
        assert wire.limit({("qp", b): 2_000_000}) == "" and rates() == [0, 16]
        assert wire.limit({}) == "" and rates() == [0, 0]
        """,
        tmp_path,
        mlx5=True,
    )


def test_a_device_without_rates_says_so(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        from types import SimpleNamespace
        from crux_torch.apply.wire import Wire
        sockets = SimpleNamespace(apply_rates=lambda rates: None)
        wire = Wire(SimpleNamespace(owned=lambda: []), sockets)
        assert client.client_pair(0)
        a, b = [c.id for c in QueuePairs().list()]
        told = wire.limit({("qp", a): 1_000_000, ("qp", b): 1_000_000})
        assert told == "2 of 2 queue pairs: its device can't limit the rate", told
        assert wire.limit({}) == ""
        """,
        tmp_path,
    )
