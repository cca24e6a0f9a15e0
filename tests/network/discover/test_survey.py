"""The probes of one host: from what a search found to a pair of a fragment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crux_torch.network.discover import survey as module
from crux_torch.network.discover.fragment import SeenPath
from crux_torch.network.discover.survey import seen_pair, sounded, survey
from crux_torch.network.discover.tasks import Peer, Search, Searched, Sound, Sounded
from crux_torch.network.probe.live_trace import Depth
from crux_torch.network.probe.packets import ProbeError
from crux_torch.network.probe.prober import PathMap

A, B, C = Peer("a", "10.0.0.1"), Peer("b", "10.0.0.2"), Peer("c", "10.0.0.3")


def path_map(**more: object) -> PathMap:
    ends = {"source": A.address, "destination": B.address, "protocol": "udp", "port": 4791}
    return PathMap(**(ends | more))  # type: ignore[arg-type]


def hops(*addresses: str | None) -> tuple[tuple[int, str | None], ...]:
    return tuple(enumerate(addresses, start=1))


def test_paths_have_their_ports_and_silent_routers_are_hops() -> None:
    found = path_map(
        hops={1: hops("l", "s0"), 2: hops("l", None), 3: hops("l", None), 4: hops("l", "s0")},
        quiet=(2,),
        distance=4,
        confidence=0.99,
    )
    pair = seen_pair(A, B, found)
    # Port 3 may have lost its answer, and the router before the peer never answers.
    assert set(pair.paths) == {
        SeenPath(("l", "s0", None), (1, 4)),
        SeenPath(("l", None, None), (2,)),
    }
    assert (pair.src, pair.dst_address, pair.confidence, pair.sprays) == (
        "a",
        B.address,
        0.99,
        False,
    )
    assert seen_pair(A, B, path_map(hops={}, repeated=6, changed=1)).sprays


@pytest.mark.parametrize(
    ("depth", "routers", "seen"),
    [
        (Depth(2, {1: "l"}, 4), 1, ("l",)),
        (Depth(1, {}, 4), 0, ()),
        (Depth(4, {1: "l"}, 4), 3, ("l", None, None)),
        (Depth(None, {1: "l", 3: "m"}, 4), 3, ("l", None, "m")),
    ],
)
def test_routers_are_counted_up_to_the_peer_or_to_the_last_that_answers(
    monkeypatch: pytest.MonkeyPatch, depth: Depth, routers: int, seen: tuple[str | None, ...]
) -> None:
    monkeypatch.setattr(module, "sound", lambda *_: depth)
    found = sounded(Sound(A, (B,), 10.0), B)
    assert (found.routers, found.hops, found.sent) == (routers, seen, 4)
    assert found.near == (routers <= 1)


def test_a_host_stops_at_the_first_of_its_leaf_and_keeps_its_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depths: Iterator[Depth] = iter([Depth(4, {1: "l"}, 6), Depth(2, {1: "l"}, 4), Depth(4, {}, 1)])
    monkeypatch.setattr(module, "sound", lambda *_: next(depths))
    waited: list[float] = []
    found = list(survey(Sound(A, (B, C, B), 2.0), waited.append))
    assert [o.peer for o in found] == [B, C]
    # Six probes at two a second.
    assert waited == [pytest.approx(3.0, abs=0.5)]


def test_what_can_not_be_probed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise ProbeError(110, "nobody answered")

    monkeypatch.setattr(module, "sound", fail)
    monkeypatch.setattr(module, "probe", fail)
    assert list(survey(Sound(A, (B,), 10.0))) == [Sounded(A, B, problem="nobody answered")]
    search = Search(A, B, 10.0, 0.99, 60.0)
    assert list(survey(search)) == [Searched(A, B, problem="nobody answered")]
