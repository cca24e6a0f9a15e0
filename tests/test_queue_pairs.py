"""Queue pairs of a process under the stand-in, over a device in memory (tests/cpp/fake_ibverbs)."""

from __future__ import annotations

from pathlib import Path

import pytest
from verbs_fakes import Fakes, build

from crux_torch.apply.queue_pairs import QueuePairs
from crux_torch.apply.transport import TransportError


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return build(tmp_path_factory.mktemp("fakes"))


def test_routes_and_labels_reach_the_wire(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        transport, pairs = Transport.load(), QueuePairs()
        assert transport.sees_queue_pairs and pairs.are_seen
        transport.set_routes([Route("10.9.0.2", dscp=26, udp_ports=(50001, 50002))])
        pairs.label(0x2a, "job/dp", 40)
        assert client.client_pair(0) and client.client_pair(0x2a) and client.client_pair(0)
        for end in range(6):
            assert client.client_send(end, end)
        labelled = 40 << 2 | 2
        assert [wire(end) for end in (0, 2, 4)] == [
            (50001, 26 << 2), (50002, labelled), (50001, 26 << 2)
        ]
        assert [wire(end) for end in (1, 3, 5)] == [(0, 0), (0, labelled), (0, 0)]
        seen = pairs.list()
        assert {one.how for one in (seen[0], *seen[2:5])} == {"at_rtr"}
        assert seen[1].how == seen[5].how == "untouched"
        assert [one.owner for one in seen] == ["", "", "job/dp", "job/dp", "", ""]
        assert [one.local_port for one in seen] == [50001, 0, 50002, 0, 50001, 0]
        assert {one.device for one in seen} == {"fake0", "fake1"}
        assert seen[0].peer == "10.9.0.2" and seen[0].peer_port == 4791 and seen[0].state == 3
        """,
        tmp_path,
    )


def test_a_live_queue_pair_is_changed_by_a_reset(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        pairs = QueuePairs()
        assert client.client_pair(0)
        a, b = (one.id for one in pairs.list())
        refused = pairs.change(a, dscp=8)
        assert (refused.how, refused.error, refused.applied) == ("needs_switch", errno.EPERM, False)
        assert "owner" in refused.reason
        pairs.allow_reset(ALL_OWNERS)
        for turn in range(50):
            assert client.client_send(0, turn) and client.client_send(1, turn)
            with pairs.held(a, b, lease_s=30):
                port = 50000 + turn
                done = [pairs.change(a, dscp=turn, udp_port=port), pairs.change(b, dscp=turn + 1)]
            assert all(one.applied and one.error == 0 and one.took_s > 0 for one in done), done
            assert client.client_send(0, turn) and client.client_send(1, turn)
            assert wire(0) == (50000 + turn, turn << 2) and wire(1) == (0, turn + 1 << 2)
        first = pairs.list()[0]
        assert first.how == "live_reset" and first.dscp == 49 and first.local_port == 50049
        assert first.bytes_sent == 100 * 64 == first.bytes_received
        pairs.hold(a, lease_s=30)
        pairs.release(a)
        for wrong in (pairs.release, pairs.hold, pairs.allow_reset_of):
            try:
                wrong(a if wrong == pairs.release else 12345)
                raise SystemExit("no error")
            except TransportError as error:
                assert error.errno in (errno.EINVAL, errno.ENOENT)
        """,
        tmp_path,
        CRUX_LIVE_QP="1",
    )


def test_errors_in_the_middle_leave_the_old_setting(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        pairs = QueuePairs()
        pairs.follow()
        assert client.client_pair(0)
        pairs.allow_reset(ALL_OWNERS)
        a, b = (one.id for one in pairs.list())
        done = {True: 0, False: 0}
        for turn in range(1, 40):
            before = pairs.list()[0]
            changed = pairs.change(a, dscp=turn, udp_port=50000 + turn)
            now = pairs.list()[0]
            done[changed.applied] += 1
            old = (before.dscp or 0, before.local_port)
            assert (now.dscp, now.local_port) == ((turn, 50000 + turn) if changed.applied else old)
            assert bool(changed.reason) != changed.applied
            assert bool(changed.error) != changed.applied
            assert client.client_send(0, turn) and client.client_send(1, turn)
            assert wire(0) == (now.local_port, now.dscp << 2)
        assert done[True] >= 5 and done[False] >= 5, done
        """,
        tmp_path,
        CRUX_TRANSPORT_FAULT="reset:7,init:6,repost:5,rtr:5,rts:6,query:23",
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
        assert (done.how, done.error) == ("live_device", 0)
        assert client.client_send(0, 1) and wire(0) == (50123, 0) and rate(0) == 8000
        assert pairs.change(a.id, rate_Bps=125_000).applied and rate(0) == 1
        assert pairs.change(a.id, rate_Bps=0).applied and rate(0) == 0
        now = pairs.list()[0]
        assert (now.how, now.local_port, now.rate_Bps) == ("live_device", 50123, None)
        # Its class only a reset could change.
        assert pairs.change(a.id, dscp=8, udp_port=50124).how == "needs_switch"
        assert pairs.list()[0].local_port == 50123
        mlx5.fake_mlx5_refuse(errno.EOPNOTSUPP, errno.EOPNOTSUPP)
        assert pairs.change(a.id, udp_port=50125).how == "needs_switch"
        refused = pairs.change(b.id, rate_Bps=77)
        assert (refused.how, refused.error) == ("refused", errno.EOPNOTSUPP)
        mlx5.fake_mlx5_refuse(0, 0)
        assert mlx5.fake_mlx5_elements() == 4
        assert client.client_close() and mlx5.fake_mlx5_elements() == 0
        """,
        tmp_path,
        mlx5=True,
    )


def test_a_reset_keeps_what_mlx5_was_told(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        pairs = QueuePairs()
        assert client.client_pair(0)
        a, b = (one.id for one in pairs.list())
        pairs.allow_reset(ALL_OWNERS)
        assert pairs.change(a, udp_port=50123, rate_Bps=1_000_000).how == "live_device"
        assert pairs.change(a, dscp=8).how == "live_reset"
        assert client.client_send(0, 1) and client.client_send(1, 1)
        assert wire(0) == (50123, 8 << 2) and pairs.list()[0].rate_Bps == 1_000_000
        """,
        tmp_path,
        mlx5=True,
        CRUX_LIVE_QP="1",
    )


def test_switched_off_it_only_forwards(fakes: Fakes, tmp_path: Path) -> None:
    fakes.run(
        """
        Transport.load().set_routes([Route("10.9.0.2", dscp=26, udp_ports=(50001,))])
        assert client.client_pair(0) and client.client_send(0, 1) and wire(0) == (0, 0)
        assert QueuePairs().list() == []
        """,
        tmp_path,
        CRUX_TRANSPORT="0",
        CRUX_LIVE_QP="1",
    )


def test_values_out_of_range_are_refused_without_a_stand_in() -> None:
    try:
        pairs = QueuePairs()
    except TransportError as error:
        pytest.skip(str(error))
    assert not pairs.are_seen
    assert pairs.list() == []
    for label, owner, dscp in ((0, "x", 1), (256, "x", 1), (3, "", 1), (3, "x", 64)):
        with pytest.raises(TransportError):
            pairs.label(label, owner, dscp)
    assert not pairs.change(1, dscp=64).applied
    assert not pairs.change(1, dscp=3).applied
