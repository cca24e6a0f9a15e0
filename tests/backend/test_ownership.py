"""Whose sockets are whose, with real gloo process groups on loopback.

The truth comes from comparing the ranks: in a group of n, gloo holds one connection for each pair
of ranks, and what one rank owns at one end its peer must own at the other.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from dscp_maps import CLASS_SELECTORS
from loopback import free_port, has_ipv6

from crux_torch.apply.dscp import TrafficClass
from crux_torch.backend.tcp_sockets import Ownership, SocketTable

pytestmark = pytest.mark.slow

TIMEOUT = datetime.timedelta(seconds=60)
LEVEL = 6
TOS = CLASS_SELECTORS[LEVEL] << 2


class UserSockets:
    """TCP connections of the user's own: a listener and both ends of each connection.

    Args:
        like_gloos: give them every option by which gloo's could be told apart.
    """

    def __init__(self, like_gloos: bool = False) -> None:
        self.sockets: list[socket.socket] = []
        self.like_gloos = like_gloos

    def open(self, count: int = 1) -> None:
        for _ in range(count):
            listener = socket.create_server(("127.0.0.1", 0))
            client = socket.create_connection(listener.getsockname())
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened = [listener, client, listener.accept()[0]]
            for sock in opened if self.like_gloos else ():
                sock.set_inheritable(True)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 30, 0))
            self.sockets += opened

    @contextlib.contextmanager
    def opening_meanwhile(self) -> Iterator[None]:
        stop = threading.Event()
        first = threading.Event()

        def work() -> None:
            while not stop.is_set() and len(self.sockets) < 300:
                self.open()
                first.set()
                stop.wait(0.001)

        thread = threading.Thread(target=work)
        thread.start()
        first.wait(30)
        try:
            yield
        finally:
            stop.set()
            thread.join(60)

    def inodes(self) -> set[int]:
        return {os.fstat(s.fileno()).st_ino for s in self.sockets}

    def classes(self) -> set[int]:
        return {s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for s in self.sockets}


def _kernel_class(inode: int) -> int:
    """TOS or traffic class of a socket, read without the code under test setting anything."""
    sock = SocketTable().scan()[inode]
    with socket.socket(fileno=os.dup(sock.fd)) as duplicate:
        if sock.family == socket.AF_INET6 and ":" in sock.local[0]:
            return duplicate.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        return duplicate.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)


def _spawned(target: Callable[..., Any], ranks: int, env: dict[str, str], *args: Any) -> list[Any]:
    """What ``target(rank, ranks, port, *args)`` returned in each of ``ranks`` new processes."""
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(ranks, spawn) as pool:
        for name, value in {"OMP_NUM_THREADS": "1", **env}.items():
            patch.setenv(name, value)
        started = [pool.submit(target, rank, ranks, port, *args) for rank in range(ranks)]
        return [each.result(timeout=120) for each in started]


def _meet(store: Any, name: str, ranks: int) -> None:
    """Waits until all ranks are here, through the store alone."""
    store.add(name, 1)
    if store.add(name, 0) == ranks:
        store.set(f"{name}/last", "1")
    store.wait([f"{name}/last"], TIMEOUT)


def _leave(store: Any, rank: int, ranks: int) -> None:
    """Rank 0, which hosts the store, stays until the others need it no more."""
    store.add("leave", 1)
    while rank == 0 and store.add("leave", 0) < ranks:
        time.sleep(0.01)


def _ends(owned: list[Any]) -> list[tuple]:
    return [(s.local, s.peer) for s in owned]


def _assert_mesh(ends_of_rank: list[list[tuple]], connections_of_rank: int) -> None:
    """Each rank has its connections, and the far end of each is another rank's."""
    every = [end for ends in ends_of_rank for end in ends]
    assert [len(ends) for ends in ends_of_rank] == [connections_of_rank] * len(ends_of_rank)
    assert len(set(every)) == len(every)
    assert {(peer, local) for local, peer in every} == set(every)


def _one_group(rank: int, ranks: int, port: int, host: str, exact: bool) -> dict[str, Any]:
    """One inner group, made while the user opens connections before, during and after."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, TIMEOUT)
    prefixed = dist.PrefixStore("group", store)
    user = UserSockets(like_gloos=exact)
    user.open(2)
    ownership = Ownership(store_ports=[port])
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    with user.opening_meanwhile():
        with ownership.watching(prefixed if exact else None, rank, ranks):
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            inner = dist.ProcessGroupGloo(prefixed, rank, ranks, options)
        at_once = len(ownership.owned())
    user.open(2)
    _meet(store, "made", ranks)
    for _ in range(2):
        inner.allreduce([torch.ones(1000)]).wait()
    _meet(store, "reduced", ranks)

    traffic_class = TrafficClass(ownership)
    report = traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    owned = ownership.owned()
    tensor = torch.full((1000,), float(rank))
    inner.allreduce([tensor]).wait()
    result = {
        "at_once": at_once,
        "ends": _ends(owned),
        "listeners": ownership.own_listeners(),
        "classes": {_kernel_class(s.inode) for s in owned},
        "report": (report.applied, report.refused, report.error),
        "user_owned": len(user.inodes() & {s.inode for s in owned}),
        "user_classes": user.classes(),
        "user_listeners": [s.getsockname() for s in user.sockets[::3]],
        "user_sockets": len(user.sockets),
        "sum": tensor[0].item(),
    }
    tcp = SocketTable().scan()
    ours = {s.inode for s in owned}
    result["strangers"] = {_kernel_class(inode) for inode in tcp if inode not in ours}
    traffic_class.revert()
    result["reverted"] = {_kernel_class(s.inode) for s in owned}
    _meet(store, "reverted", ranks)
    _leave(store, rank, ranks)
    return result


def _check_one_group(results: list[dict[str, Any]], ranks: int) -> None:
    for result in results:
        assert result["report"] == (len(result["ends"]), 0, "")
        assert result["classes"] == ({TOS} if result["ends"] else set())
        assert result["reverted"] == ({0} if result["ends"] else set())
        assert result["strangers"] == {0}
        assert (result["user_owned"], result["user_classes"]) == (0, {0})
        assert not set(result["listeners"]) & set(result["user_listeners"])
        assert len(result["listeners"]) == 1
        assert result["user_sockets"] >= 15
        assert result["sum"] == sum(range(ranks))


@pytest.mark.parametrize(
    ("ranks", "exact"), [(2, False), (4, True)], ids=["by_options", "by_published"]
)
def test_owns_the_mesh_of_a_group_and_nothing_of_the_users(ranks, exact):
    results = _spawned(_one_group, ranks, {}, "127.0.0.1", exact)
    _check_one_group(results, ranks)
    _assert_mesh([r["ends"] for r in results], ranks - 1)
    assert [r["at_once"] for r in results] == [ranks - 1] * ranks


@pytest.mark.skipif(not has_ipv6(), reason="::1 can't be bound on this machine")
def test_owns_a_group_over_ipv6():
    results = _spawned(_one_group, 2, {}, "::1", True)
    _check_one_group(results, 2)
    _assert_mesh([r["ends"] for r in results], 1)
    assert {local[0] for r in results for local, _ in r["ends"]} == {"::1"}


def test_owns_connections_that_a_lazy_group_accepts_later():
    results = _spawned(_one_group, 3, {"TORCH_GLOO_LAZY_INIT": "1"}, "127.0.0.1", False)
    _check_one_group(results, 3)
    assert [r["at_once"] for r in results] == [0, 0, 0]
    assert sum(len(r["ends"]) for r in results) >= 2, "a ring of three ranks has two connections"
    for result in results:
        assert {local for local, _ in result["ends"]} <= {tuple(e) for e in result["listeners"]}


def _groups_come_and_go(rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Through torch.distributed's own functions: world, sub-groups, a later group, destruction."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, TIMEOUT)
    ownership = Ownership(store_ports=[port])
    traffic_class = TrafficClass(ownership)
    with ownership.watching():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
    result: dict[str, Any] = {"world": _ends(ownership.owned())}

    with ownership.watching():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    first = traffic_class.refresh()
    result["with_pairs"] = _ends(ownership.owned())
    result["marked"] = (first.applied, first.refused)

    with ownership.watching():
        later = dist.new_group(list(range(ranks)))
    tensor = torch.ones(10)
    for group in (None, pair, later):
        dist.all_reduce(tensor, group=group)
    result["product"] = tensor[0].item()
    result["marked_later"] = traffic_class.refresh().applied
    _meet(store, "later", ranks)

    before = {s.inode for s in ownership.owned()}
    fds = {s.fd for s in ownership.owned()}
    dist.destroy_process_group(later)
    dist.destroy_process_group(pair)
    del later, pair, pairs, group
    _meet(store, "destroyed", ranks)
    user = UserSockets()
    user.open(12)
    result["fds_reused"] = len(fds & {s.fileno() for s in user.sockets})
    after = traffic_class.refresh()
    owned = {s.inode for s in ownership.owned()}
    result["still"] = (_ends(ownership.owned()), owned <= before, after.applied, after.refused)
    result["listeners"] = len(ownership.own_listeners())
    traffic_class.apply_level(1, CLASS_SELECTORS)
    result["user"] = (user.classes(), len(owned & user.inodes()))
    _meet(store, "end", ranks)
    traffic_class.revert()
    result["reverted"] = ({_kernel_class(inode) for inode in owned}, user.classes())
    _meet(store, "reverted", ranks)
    dist.destroy_process_group()
    result["left"] = len(ownership.owned())
    result["after_the_end"] = traffic_class.revert().marks
    _leave(store, rank, ranks)
    return result


def test_follows_groups_that_come_and_go():
    results = _spawned(_groups_come_and_go, 4, {})
    _assert_mesh([r["world"] for r in results], 3)
    _assert_mesh([r["with_pairs"] for r in results], 4)
    _assert_mesh([r["still"][0] for r in results], 3)
    for result in results:
        assert result["marked"] == (4, 0)
        assert result["marked_later"] == 7
        assert result["product"] == 4 * 2 * 4
        assert result["still"][0] == result["world"]
        assert result["still"][1:] == (True, 3, 0)
        assert result["listeners"] == 1
        assert result["user"] == ({0}, 0)
        assert result["reverted"] == ({0}, {0})
        assert result["after_the_end"] == ()
    assert sum(r["fds_reused"] for r in results) > 0, "the test meets no reused descriptor"


def test_a_group_that_fails_to_form_claims_nothing_and_its_error_passes():
    ownership = Ownership()

    def fail() -> None:
        user.open()
        raise RuntimeError("no peer came")

    user = UserSockets()
    with pytest.raises(RuntimeError, match="no peer came"), ownership.watching():
        fail()
    assert ownership.owned() == []
    assert ownership.own_listeners() == []


def test_a_store_that_fails_does_not_stop_the_group():
    class Broken:
        def check(self, keys):
            raise RuntimeError("connection reset")

        def get(self, key):
            raise RuntimeError("connection reset")

    ownership = Ownership()
    with ownership.watching(Broken(), 0, 2):
        made = True
    assert made
    assert ownership.owned() == []
