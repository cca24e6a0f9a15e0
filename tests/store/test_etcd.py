"""The store over a real etcd: what only it must withstand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_fakes import SPAWN, until
from etcd_server import Etcd, certificates, needs_etcd, wait_ready
from loopback import free_port
from places import SUPPORT
from store_server import works
from training_job import alive

from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import (
    EtcdAddress,
    ProcessConnector,
    open_store,
    parse_etcd,
    server_addresses,
)


def test_an_address_is_taken_apart() -> None:
    assert parse_etcd("etcd://a:1,b.c:2379,[::1]:3/x/y/?ca=/ca&cert=c&key=k&auth=/p%20q") == (
        EtcdAddress(("a:1", "b.c:2379", "[::1]:3"), "x/y/", "/ca", "c", "k", "/p q")
    )
    assert parse_etcd("etcd://a:1") == EtcdAddress(("a:1",))
    assert parse_etcd("etcd://a:1").is_bare
    assert not parse_etcd("etcd://127.0.0.1:1,[::1]:2").is_bare
    assert not parse_etcd("etcd://a:1?ca=x").is_bare
    assert server_addresses("etcd://a:1,[::1]:2/x") == (("a", 1), ("::1", 2))
    assert server_addresses("tcp://a:3") == (("a", 3),)
    assert server_addresses("none") == ()


@pytest.mark.parametrize(
    "url",
    [
        *("etcd://", "etcd://a", "etcd://a:0", "etcd://a:99999", "etcd://a:1,", "etcd://u@a:1"),
        *("etcd://a:1?x", "etcd://a:1?b=c", "etcd://a:1?ca=x&ca=y", "etcd://a:1#f", "tcp://a:1"),
        *("etcd://a:1?ca=x&cert=y", "etcd://a:1?cert=x&key=y"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(SettingsError, match=r"expected|belong together"):
        parse_etcd(url)


def pid_of(store: StoreClient) -> int:
    connector = store._connector
    assert isinstance(connector, ProcessConnector)
    assert connector.pid is not None
    return connector.pid


Open = Callable[..., StoreClient]


@pytest.fixture
def open_() -> Iterator[Open]:
    opened: list[StoreClient] = []

    def make(place: str, **options: float) -> StoreClient:
        opened.append(open_store(f"etcd://{place}", timeout_s=options.get("timeout_s", 10.0)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@needs_etcd
@pytest.mark.slow
def test_clusters_have_their_prefixes(etcd: Etcd, open_: Open) -> None:
    one, other, all_ = (open_(etcd.endpoints + place) for place in ("/one", "/other", ""))
    for store in (one, other, all_):
        until(lambda s=store: works(s), what="an answer")
    one.put("k", b"1", lease_s=60.0)
    other.put("k", b"2", lease_s=60.0)
    assert (one.get("k"), other.get("k")) == (b"1", b"2")
    assert sorted(one.list("k")) == ["k"]
    until(lambda: {"one/k", "other/k"} <= all_.list("o").keys(), what="both below no prefix")
    # What another program wrote there that no store of ours could hold.
    etcd.ctl("put", os.fsdecode(b"one/k\xff\xfe"), "v")
    one.put("k/2", b"", lease_s=60.0)
    assert sorted(one.list("k")) == ["k", "k/2"]


@needs_etcd
@pytest.mark.slow
def test_large_answers_come_in_pages_and_prefixes_in_any_order(etcd: Etcd, open_: Open) -> None:
    one, other = (open_(etcd.endpoints + "/apart") for _ in range(2))
    for store in (one, other):
        until(lambda s=store: works(s), what="an answer")
    many = {f"crux-plan/c/{n:02}": b"%d" % n * (100_000 + n) for n in range(20)}
    for key, value in many.items():
        one.put(key, value, lease_s=60.0)
        assert one.get(key) == value
    assert other.list("crux-plan/c/") == many  # in several pages
    assert other.list("crux-plan/c/1") == {k: v for k, v in many.items() if k[12] == "1"}
    assert other.compare_and_swap("crux-plan/c/00", many["crux-plan/c/00"], b"new", lease_s=60.0)
    one.delete("crux-plan/c/01")
    until(lambda: one.get("crux-plan/c/00") == b"new", what="the other's write")
    until(lambda: other.get("crux-plan/c/01") is None, what="the other's deletion")
    del many["crux-plan/c/01"]
    assert one.list("crux-p") == other.list("crux-p") == many | {"crux-plan/c/00": b"new"}


@needs_etcd
@pytest.mark.slow
def test_the_store_process_has_no_torch_and_ends_with_whoever_started_it(etcd: Etcd) -> None:
    code = (
        "import sys, time\n"
        "from crux_torch.store.endpoint import open_store\n"
        "from crux_torch.errors import StoreError\n"
        f"store = open_store('etcd://{etcd.endpoints}/end')\n"
        "while True:\n"
        "    try: store.put('k', b'v'); break\n"
        "    except StoreError: time.sleep(0.05)\n"
        "assert not {'torch', 'grpc', 'google.protobuf'} & set(sys.modules)\n"
        "print(store._connector.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "cygrpc" in maps
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pid), what="its end")


@needs_etcd
@pytest.mark.slow
def test_a_store_process_that_dies_or_stops_is_replaced(etcd: Etcd, open_: Open) -> None:
    store = open_(etcd.endpoints + "/dies", timeout_s=2.0)
    until(lambda: works(store), what="an answer")
    store.put("k", b"v", lease_s=60.0)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = pid_of(store)
        os.kill(before, number)
        until(lambda: works(store), what="the next one")
        assert pid_of(store) != before
        assert store.get("k") == b"v"


@needs_etcd
@pytest.mark.slow
def test_leases_are_kept_alive_and_end_with_their_owner(etcd: Etcd, open_: Open) -> None:
    one, other = open_(etcd.endpoints + "/leases"), open_(etcd.endpoints + "/leases")
    until(lambda: works(one) and works(other), what="an answer")
    one.put("k", b"v", lease_s=2.0)
    began_s = time.monotonic()
    revision = etcd.ctl("get", "leases/k", "-w", "json")
    until(lambda: other.get("k") == b"v", what="the other to see it")
    while time.monotonic() < began_s + 5.0:
        one.put("k", b"v", lease_s=2.0)
        assert other.get("k") == b"v"
        time.sleep(0.3)
    # Kept alive, not written again: a renewal is no change for anybody.
    after = etcd.ctl("get", "leases/k", "-w", "json")
    assert '"version":1,' in revision
    assert '"version":1,' in after
    until(lambda: other.get("k") is None, what="the end of the lease")
    # A key that another one took over is written, though the value is the same.
    one.put("k", b"v", lease_s=30.0)
    until(lambda: other.get("k") == b"v", what="the other to see it")
    other.put("k", b"v", lease_s=2.0)
    one.put("k", b"v", lease_s=30.0)
    time.sleep(5.0)
    assert other.get("k") == b"v"


@needs_etcd
@pytest.mark.slow
def test_compaction_while_the_watch_is_cut_off_loses_nothing(etcd: Etcd, open_: Open) -> None:
    watching, writing = open_(etcd.endpoints + "/cut"), open_(etcd.endpoints + "/cut")
    until(lambda: works(watching) and works(writing), what="an answer")
    for n in range(50):
        writing.put(f"k/{n}", b"old", lease_s=300.0)
    until(lambda: len(watching.list("k/")) == 50, what="all keys")
    # The watching store's process stands still while keys change, go, and are compacted away.
    pid = pid_of(watching)
    os.kill(pid, signal.SIGSTOP)
    for n in range(0, 50, 2):
        writing.delete(f"k/{n}")
        writing.put(f"k/{n + 1}", b"new", lease_s=300.0)
    latest = etcd.ctl("get", "cut/k/1", "-w", "json").split('"revision":')[1].split(",")[0]
    etcd.ctl("compact", latest)
    etcd.processes[0].send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    time.sleep(3.0)
    etcd.processes[0].send_signal(signal.SIGCONT)
    expected = {f"k/{n}": b"new" for n in range(1, 50, 2)}

    def has_all() -> bool:
        try:
            return watching.list("k/") == expected
        except StoreError:
            return False

    until(has_all, what="what changed meanwhile")


def sent_bytes(etcd: Etcd) -> float:
    """What the etcd has sent to its clients."""
    with urllib.request.urlopen(f"http://127.0.0.1:{etcd.ports[0]}/metrics", timeout=60) as page:
        rows = page.read().decode().splitlines()
    (row,) = [row for row in rows if row.startswith("etcd_network_client_grpc_sent_bytes_total")]
    return float(row.split()[1])


@needs_etcd
@pytest.mark.slow
def test_a_client_is_sent_only_what_it_asks_for(tmp_path: Path, open_: Open) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        writing = open_(etcd.endpoints)
        until(lambda: works(writing), what="an answer")
        few, all_ = [open_(etcd.endpoints) for _ in range(4)], open_(etcd.endpoints)
        value = b"v" * 10_000

        def write(generation: bytes) -> float:
            before = sent_bytes(etcd)
            for n in range(20):
                writing.put(f"k/{n}", value + generation, lease_s=300.0)
            for store in few:
                until(lambda s=store: s.get("k/1") == value + generation, what="the own key")
            return sent_bytes(etcd) - before

        write(b"0")
        # The writer has each key once, and each of the others one key.
        assert write(b"1") < 30 * len(value)
        for store in (all_, *few):
            until(lambda s=store: len(s.list("k/")) == 20, what="all keys")
        assert write(b"2") > 80 * len(value)


def _look_again_and_again(url: str) -> None:
    """What is asked for grows and shrinks while it changes; no view may be older than the last."""
    from crux_torch.store import etcd as module
    from crux_torch.store.frames import Changes, Put, Read, Refused

    module.IDLE_S = 0.3
    reader, writer = (module.EtcdContents(parse_etcd(url)) for _ in range(2))
    reader.start()
    writer.start()
    latest = [0]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            done = writer.answer(Put("k/n", b"%d" % (latest[0] + 1), 60.0))
            latest[0] += not isinstance(done, Refused)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, looks, widest = 0, 0, 0
        ends_s = time.monotonic() + 6.0
        while time.monotonic() < ends_s:
            key, prefix = [("k/n", False), ("k/", True), ("", True), ("k/n", False)][
                looks // 20 % 4
            ]
            answer = reader.answer(Read(key, prefix, 0))
            looks += 1
            if isinstance(answer, Changes) and (value := dict(answer.values).get("k/n")):
                assert int(value) >= seen, "an older value after a newer one"
                seen = int(value)
                widest = max(widest, len(reader._parts))
            if looks % 80 > 60:
                time.sleep(0.02)  # the wide ones fall idle
        assert seen > 10
        assert widest >= 2
        stop.set()
        thread.join(60)
        time.sleep(1.0)
        answer = reader.answer(Read("k/n", False, 0))
        assert isinstance(answer, Changes)
        assert int(dict(answer.values)["k/n"] or 0) in (latest[0], latest[0] + 1)
        assert [(part.key, part.prefix) for part in reader._parts[1:]] == [("k/n", False)]
    finally:
        stop.set()


@needs_etcd
@pytest.mark.slow
def test_a_view_is_never_older_than_the_last_while_what_is_asked_for_changes(etcd: Etcd) -> None:
    process = SPAWN.Process(
        target=_look_again_and_again, args=(f"etcd://{etcd.endpoints}/again",), daemon=True
    )
    process.start()
    process.join(120)
    assert process.exitcode == 0


def _late_events() -> None:
    """A store process's contents, on a member whose answers and events come as the test says."""
    from types import SimpleNamespace

    from crux_torch.store import etcd as module
    from crux_torch.store.etcd_session import Session
    from crux_torch.store.frames import Changes, Read

    contents = module.EtcdContents(parse_etcd("etcd://127.0.0.1:1"))
    held = {b"k": (b"0", 5)}
    revision = [5]

    def numbers(at: int) -> dict[str, int]:
        versions = {5: 1, 7: 2, 9: 3, 10: 4, 11: 5, 12: 6}
        return {"mod_revision": at, "create_revision": 5, "version": versions.get(at, 0)}

    def read(request: Any, **_: object) -> Any:
        first, end = request.key, request.range_end
        header = SimpleNamespace(revision=revision[0])
        kvs = [
            SimpleNamespace(key=key, value=value, lease=1, **numbers(at))
            for key, (value, at) in sorted(held.items())
            if key == first or (end and first <= key and (end == b"\0" or key < end))
        ]
        return SimpleNamespace(header=header, kvs=kvs, more=False)

    def sent() -> list[Any]:
        return [contents._requests.get_nowait() for _ in range(contents._requests.qsize())]

    def look(key: str, prefix: bool) -> dict[str, bytes | None]:
        contents._heard_s = time.monotonic()
        answer = contents.answer(Read(key, prefix, 0))
        assert isinstance(answer, Changes), answer
        return dict(answer.values)

    def respond(watch: int, *events: object, created: bool = False, canceled: bool = False) -> None:
        about = {"created": created, "canceled": canceled, "cancel_reason": ""}
        contents._take(session, SimpleNamespace(watch_id=watch, events=events, **about))

    def tell(watch: int, value: bytes, at: int) -> None:
        kv = SimpleNamespace(key=b"k", value=value, lease=1, **numbers(at))
        respond(watch, SimpleNamespace(kv=kv, type=0, DELETE=1))

    session = Session(parse_etcd("etcd://127.0.0.1:1"), "127.0.0.1:1")
    session._kv = SimpleNamespace(Range=read)
    contents._read_all(session)
    respond(0, created=True)
    assert look("k", False) == {"k": b"0"}
    respond(1, created=True)
    tell(1, b"1", 7)
    assert look("k", False) == {"k": b"1"}
    for at in (5, 6, 7):  # late, or once more
        tell(1, b"old", at)
    assert look("k", False) == {"k": b"1"}
    # Asked for with others: one watch takes the place of the other.
    held.update({b"k": (b"2", 9), b"kk": (b"x", 8)})
    revision[0] = 9
    sent()
    assert look("k", True) == {"k": b"2", "kk": b"x"}
    cancel, create = sent()
    assert cancel.cancel_request.watch_id == 1
    assert create.create_request.start_revision == 9
    tell(1, b"late", 8)
    respond(2, created=True)
    tell(2, b"late", 8)
    tell(2, b"late", 9)
    assert look("k", True) == {"k": b"2", "kk": b"x"}
    respond(1, canceled=True)
    tell(2, b"3", 10)
    assert look("k", False) == {"k": b"3"}
    # It falls idle: what is asked for from now on is read anew.
    contents._parts[1].used_s -= 2 * module.IDLE_S
    held.update({b"k": (b"4", 11)})
    revision[0] = 11
    assert look("k", False) == {"k": b"4"}
    assert "kk" not in contents._mirror
    assert [(part.key, part.prefix) for part in contents._parts[1:]] == [("k", False)]
    tell(2, b"late", 12)
    assert look("k", False) == {"k": b"4"}
    respond(3, created=True)
    # Asked for with others before the member has told that the first watch is there.
    assert look("a", False) == {"a": None}
    assert look("a", True) == {}
    sent()
    respond(4, created=True)
    (cancel,) = sent()
    assert cancel.cancel_request.watch_id == 4


def test_events_that_come_late_take_no_view_back() -> None:
    pytest.importorskip("pyetcd", reason="it takes etcd-sdk-python")
    process = SPAWN.Process(target=_late_events, daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@needs_etcd
@pytest.mark.slow
def test_an_etcd_that_stands_still_or_is_away_costs_a_bounded_time(
    tmp_path: Path, open_: Open
) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        store = open_(etcd.endpoints, timeout_s=2.0)
        until(lambda: works(store), what="an answer")
        pid = pid_of(store)
        etcd.processes[0].send_signal(signal.SIGSTOP)
        until(lambda: refusal(store) == "no contact", what="the store to be away")
        assert pid_of(store) == pid, "it is not the process that failed"
        etcd.processes[0].send_signal(signal.SIGCONT)
        until(lambda: works(store), what="an answer again")
        etcd.restart(0)
        until(lambda: works(store), what="an answer after a restart")


@needs_etcd
@pytest.mark.slow
def test_of_three_members_one_may_be_away(tmp_path: Path, open_: Open) -> None:
    with Etcd(tmp_path, members=3) as etcd:
        wait_ready(etcd)
        store = open_(etcd.endpoints + "/three", timeout_s=2.0)
        until(lambda: works(store), what="an answer")
        store.put("k", b"v", lease_s=600.0)
        for n in range(3):
            etcd.processes[n].send_signal(signal.SIGSTOP)
            until(lambda: works(store), what="an answer of the others")
            assert store.get("k") == b"v"
            etcd.processes[n].send_signal(signal.SIGCONT)
        for n in (0, 1):
            etcd.processes[n].send_signal(signal.SIGSTOP)
        until(lambda: not works(store), what="no answer without a majority")
        for n in (0, 1):
            etcd.processes[n].send_signal(signal.SIGCONT)
        until(lambda: works(store), what="an answer again")


@needs_etcd
@pytest.mark.slow
def test_tls_takes_the_right_certificates_on_both_sides(tmp_path: Path, open_: Open) -> None:
    ours, theirs = certificates(tmp_path, "ours"), certificates(tmp_path, "theirs")
    flags = ["--cert-file", ours["cert"], "--key-file", ours["key"], "--client-cert-auth"]
    with Etcd(tmp_path, tls=[*flags, "--trusted-ca-file", ours["ca"]]) as etcd:
        wait_ready(etcd, "--cacert", ours["ca"], "--cert", ours["cert"], "--key", ours["key"])

        def place(ca: dict[str, str], own: dict[str, str] | None) -> str:
            cert = f"&cert={own['cert']}&key={own['key']}" if own else ""
            return f"{etcd.endpoints}/tls?ca={ca['ca']}{cert}"

        good = open_(place(ours, ours))
        until(lambda: works(good), what="an answer")
        for ca, own in ((ours, theirs), (ours, None), (theirs, ours)):
            bad = open_(place(ca, own), timeout_s=2.0)
            until(lambda b=bad: refusal(b) not in ("", "starting"), what="the process")
            assert refusal(bad) == "no contact"
        bare = open_(etcd.endpoints + "/tls", timeout_s=2.0)
        until(lambda: refusal(bare) == "no contact", what="no contact without TLS")
        assert works(good)


def refusal(store: StoreClient) -> str:
    try:
        store.get("k")
    except StoreError as error:
        text = str(error)
        if "no contact" in text:
            return "no contact"
        return "starting" if "starting" in text or "next attempt" in text else text
    return ""


@needs_etcd
@pytest.mark.slow
def test_a_user_writes_what_its_role_lets_it(tmp_path: Path, open_: Open) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        etcd.ctl("role", "add", "tenant")
        etcd.ctl("role", "grant-permission", "tenant", "read", "lab/", "--prefix")
        etcd.ctl("role", "grant-permission", "tenant", "readwrite", "lab/crux/c/jobs/a", "--prefix")
        for user, roles in (("root", ["root"]), ("a", ["tenant"])):
            etcd.ctl("user", "add", f"{user}:secret")
            for role in roles:
                etcd.ctl("user", "grant-role", user, role)
        etcd.ctl("auth", "enable")
        auth = tmp_path / "auth"
        auth.write_text("a:secret\n")
        store = open_(f"{etcd.endpoints}/lab?auth={auth}")

        def puts(key: str) -> bool:
            try:
                store.put(key, b"v", lease_s=60.0)
            except StoreError:
                return False
            return store.get(key) == b"v"

        until(lambda: puts("crux/c/jobs/a1"), what="its own key")
        assert not puts("crux/c/jobs/b1")
        assert not puts("crux/c/plan")
        with pytest.raises(StoreError, match="permission") as told:
            store.delete("crux/c/jobs/b1")
        assert told.value.cause is Cause.ROLE
        auth.write_text("a:wrong\n")
        stranger = open_(f"{etcd.endpoints}/lab?auth={auth}")
        until(lambda: refusal(stranger) == "no contact", what="a wrong password")
        with pytest.raises(StoreError) as told:
            stranger.get("k")
        assert told.value.cause is Cause.ETCD_LOGIN, told.value


@needs_etcd
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simple", "jwt"])
def test_a_token_that_has_ended_is_replaced(tmp_path: Path, open_: Open, kind: str) -> None:
    flags = ["--auth-token-ttl", "2"]
    if kind == "jwt":
        private, public = tmp_path / "private.pem", tmp_path / "public.pem"
        for command in (
            f"ecparam -genkey -name prime256v1 -noout -out {private}",
            f"ec -in {private} -pubout -out {public}",
        ):
            subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
        flags = [
            "--auth-token",
            f"jwt,pub-key={public},priv-key={private},sign-method=ES256,ttl=2s",
        ]
    with Etcd(tmp_path, flags=flags) as etcd:
        wait_ready(etcd)
        for words in ("role add root", "user add root:secret", "user grant-role root root"):
            etcd.ctl(*words.split())
        etcd.ctl("auth", "enable")
        auth = tmp_path / "auth"
        auth.write_text("root:secret\n")
        store = open_(f"{etcd.endpoints}/lab?auth={auth}")
        until(lambda: works(store), what="an answer")
        pid = pid_of(store)
        for n in range(3):
            # At rest: leases are kept alive, which does not keep a token.
            for _ in range(16):
                store.put("rest", b"v", lease_s=60.0)
                time.sleep(0.25)
            store.put("k", b"%d" % n, lease_s=60.0)
            assert store.compare_and_swap("k", b"%d" % n, b"swapped")
            etcd.ctl("--user", "root:secret", "role", "add", f"r{n}")
            store.put("k", b"after another role", lease_s=60.0)
            store.delete("k")
        assert pid_of(store) == pid


@pytest.mark.parametrize("rule", ["always", "not before its start"])
def test_an_etcd_at_rest_is_in_contact(open_: Open, rule: str) -> None:
    """etcd 3.5.30 tells no progress of a watch that begins after the last revision."""
    pytest.importorskip("pyetcd", reason="it takes etcd-sdk-python")
    port = free_port()
    fake = subprocess.Popen([sys.executable, SUPPORT / "fake_etcd.py", f"{port}", rule])
    try:
        store = open_(f"127.0.0.1:{port}")
        until(lambda: refusal(store) == "", what="an answer")
        ends_s = time.monotonic() + 3 * 2.0  # thrice what a silent watch is given
        while time.monotonic() < ends_s:
            assert refusal(store) == ""
            time.sleep(0.1)
    finally:
        fake.kill()
        fake.wait()


@pytest.mark.slow
def test_a_file_that_is_missing_is_said(tmp_path: Path, open_: Open) -> None:
    pytest.importorskip("pyetcd", reason="it takes etcd-sdk-python")
    missing = open_(f"127.0.0.1:1?ca={tmp_path / 'missing'}")
    until(lambda: "No such file" in refusal(missing), what="the missing file")


@needs_etcd
def test_an_etcd_refuses_to_tell_a_clock_and_goes_on(etcd: Etcd, open_: Open) -> None:
    store = open_(etcd.endpoints)
    until(lambda: works(store), what="an answer")
    store.put("a", b"1")
    with pytest.raises(StoreError, match="time shifts need a store tcp://"):
        store.clock_ns()
    assert store.get("a") == b"1"
