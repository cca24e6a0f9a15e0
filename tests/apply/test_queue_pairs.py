"""Queue pairs of a process under the verbs shim on a device in memory (tests/cpp/fake_ibverbs)."""

from __future__ import annotations

from pathlib import Path

import pytest
from verbs_fakes import Fakes, build

from crux_torch.apply.transport import TransportError
from crux_torch.apply.wire import QueuePairs


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return build(tmp_path_factory.mktemp("fakes"))


def test_routes_and_labels_reach_the_wire(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        transport, pairs = Transport.load(), QueuePairs()
        assert transport.sees_queue_pairs and pairs.are_seen
        transport.set_routes([Route("10.9.0.2", qp_dscp=26, udp_ports=(50001, 50002))])
        pairs.label(0x2a, "job/dp", 40)
        pairs.label(0x32, "job/tp")
        assert all(map(client.client_pair, (0, 0x2a, 0, 0x32)))
        labelled = 40 << 2 | 2
        assert [wire(end) for end in (0, 2, 4)] == [
            (50001, 26 << 2), (50002, labelled), (50001, 26 << 2)
        ]
        assert [wire(end) for end in (1, 3, 5, 7)] == [(0, 0), (0, labelled), (0, 0), (0, 0x32)]
        seen = pairs.list()
        assert {one.how for one in (seen[0], *seen[2:5])} == {"at_rtr"}
        assert seen[1].how == seen[5].how == "untouched"
        owners = ["", "", "job/dp", "job/dp", "", "", "job/tp", "job/tp"]
        assert [one.owner for one in seen] == owners
        assert [one.local_port for one in seen[:6]] == [50001, 0, 50002, 0, 50001, 0]
        assert {one.device for one in seen} == {"fake0", "fake1"}
        assert seen[0].peer == "10.9.0.2" and seen[0].peer_port == 4791 and seen[0].state == 3
        """,
        tmp_path,
    )


def test_whatever_modify_qp_answers_it_connects_as_its_program_asked(
    fakes: Fakes, tmp_path: Path
) -> None:
    fakes.run(
        """
        Transport.load().set_routes([Route("10.9.0.2", qp_dscp=26, udp_ports=(50001,))])
        for number, error in enumerate(sorted(errno.errorcode)):
            device.fake_refuse_flow_labels(error)
            assert client.client_pair(2), error
            mine = QueuePairs().list()[2 * number]
            assert (mine.how, mine.error, mine.state) == ("refused", error, 3), error
            assert wire(2 * number) == (0, 2) and mine.local_port == 0, error
        device.fake_refuse_flow_labels(0)
        assert client.client_pair(2) and wire(2 * number + 2) == (50001, 26 << 2 | 2)
        """,
        tmp_path,
    )


def test_mlx5_changes_port_and_rate_in_place(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        pairs = QueuePairs()
        Transport.load().set_routes([Route("10.9.0.1", rate_Bps=2_000_000)])
        assert client.client_pair(0)
        a, b = pairs.list()
        mlx5.fake_mlx5_rate.restype = ctypes.c_uint32
        def rate(end):
            return mlx5.fake_mlx5_rate(client.client_number(end))
        assert rate(1) == 16 and b.rate_Bps == 2_000_000 and a.rate_Bps is None
        done = pairs.change(a.id, udp_port=50123, rate_Bps=1_000_000_000)
        assert (done.how, done.error, done.reason, done.applied) == ("live_device", 0, "", True)
        assert wire(0) == (50123, 0) and rate(0) == 8000
        assert pairs.change(a.id, rate_Bps=125_000).applied and rate(0) == 1
        assert pairs.change(a.id, rate_Bps=0).applied and rate(0) == 0
        now = pairs.list()[0]
        assert (now.how, now.local_port, now.rate_Bps) == ("live_device", 50123, None)
        mlx5.fake_mlx5_refuse(errno.EOPNOTSUPP, errno.EOPNOTSUPP)
        refused = pairs.change(a.id, udp_port=50125)
        assert (refused.how, refused.applied) == ("needs_switch", False) and refused.reason
        assert pairs.list()[0].local_port == 50123
        refused = pairs.change(b.id, rate_Bps=77)
        assert (refused.how, refused.error) == ("refused", errno.EOPNOTSUPP)
        mlx5.fake_mlx5_refuse(0, 0)
        assert mlx5.fake_mlx5_elements() == 4
        assert client.client_close() and mlx5.fake_mlx5_elements() == 0
        """,
        tmp_path,
        mlx5=True,
    )


def test_what_is_posted_is_counted(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        SEND, WRITE, WRITE_WITH_IMM, READ = 2, 0, 1, 4
        def post(end, opcode, *sizes):
            bytes = (ctypes.c_uint32 * len(sizes))(*sizes)
            return client.client_post(end, opcode, bytes, len(sizes))
        def counted():
            return [one.bytes_sent for one in QueuePairs().list()]
        assert client.client_pair(0) and client.client_pair(0)
        assert counted() == [0, 0, 0, 0]
        assert post(0, SEND, 100, 20, 3) == 0 and post(2, WRITE, 1 << 31, 1 << 31) == 0
        assert counted() == [123, 0, 1 << 32, 0]
        assert post(0, WRITE_WITH_IMM, 0, 77) == 0
        assert counted()[0] == 200
        # What is fetched is not sent.
        assert post(0, READ, 1000) == 0 and counted()[0] == 200
        # The device takes what stands before the one that it refuses.
        assert post(1, SEND, 10, 0, 10) == errno.EINVAL and counted()[1] == 10
        """,
        tmp_path,
    )


def test_switched_off_it_only_forwards(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        Transport.load().set_routes([Route("10.9.0.2", qp_dscp=26, udp_ports=(50001,))])
        assert client.client_pair(0) and wire(0) == (0, 0)
        assert QueuePairs().list() == []
        """,
        tmp_path,
        CRUX_TRANSPORT="0",
    )


def test_values_out_of_range_are_refused_without_a_shim() -> None:
    try:
        pairs = QueuePairs()
    except TransportError as error:
        pytest.skip(str(error))
    assert not pairs.are_seen
    assert pairs.list() == []
    for label, owner, dscp in ((0, "x", 1), (256, "x", 1), (3, "", 1), (3, "x", 64)):
        with pytest.raises(TransportError):
            pairs.label(label, owner, dscp)
    assert not pairs.change(1, udp_port=70000).applied
    assert not pairs.change(1, udp_port=50001).applied
