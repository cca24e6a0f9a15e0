"""The transport library in real processes on loopback, and its Python face."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, SUPPORT

from crux_torch.apply import transport
from crux_torch.apply.transport import LIBRARY, Route, Transport, TransportError, store_ports

pytestmark = pytest.mark.slow

HEADER = ROOT / "csrc/transport/crux_transport.h"
BOUND_S = 60

#: What every program below begins with: a listener, and what is known of a socket.
_PRELUDE = """
import json, os, socket, sys
from crux_torch.apply.transport import Route, Transport
def serve(): return socket.create_server(("127.0.0.1", 0), backlog=64)
def inode(s): return os.fstat(s.fileno()).st_ino
def tos(s): return s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
def known(s): return next((c for c in Transport.load().connections() if c.id == inode(s)), None)
def tell(**facts): print(json.dumps(facts), flush=True)
"""


def run(program: str, preload: bool = True, **env: str) -> tuple[Any, str]:
    """What ``program`` told last, and its stderr."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "LD_PRELOAD"))}
    loaded = {"LD_PRELOAD": str(LIBRARY)} if preload else {}
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + program],
        env={**inherited, **loaded, **env},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_preloaded_library_sees_both_ends_of_every_connection() -> None:
    told, _ = run("""
t = Transport.load(); l = serve(); c = socket.create_connection(l.getsockname()); a, _ = l.accept()
c.sendall(b"x" * 1000)
while len(a.recv(1000, socket.MSG_PEEK)) < 1000: pass
mine, theirs = known(c), known(a)
tell(sees=t.sees_sockets, mine=[mine.local, mine.local_port, mine.peer, mine.peer_port],
     names=[*c.getsockname(), *c.getpeername()], how=[mine.how, theirs.how], owner=mine.owner,
     bytes=[mine.bytes_sent, theirs.bytes_received], listener=known(l) is None, kind=mine.kind)
""")
    assert told["sees"] is True
    assert told["mine"] == told["names"]
    assert told["how"] == ["untouched", "untouched"]
    assert told["bytes"] == [1000, 1000]
    assert told["listener"] is True
    assert told["kind"] == "tcp"
    assert "_socket" in told["owner"] or "python" in told["owner"]


def test_whatever_setsockopt_answers_a_connection_carries_on_and_says_so() -> None:
    told, _ = run(
        """
import errno
from refuse_options import install
t = Transport.load(); l = serve(); c = socket.create_connection(l.getsockname()); a, _ = l.accept()
wrong = []
# Of several filters the kernel takes the errno of the last one.
for error in sorted(errno.errorcode):
    install(error)
    done = t.set_socket(c.fileno(), inode(c), dscp=10, rate_Bps=5_000_000)
    c.sendall(b"x")
    if (done.errno, tos(c), a.recv(1)) != (error, 0, b"x") or known(c).error != error:
        wrong.append((error, done.errno, tos(c), known(c).error))
tell(wrong=wrong, how=known(c).how)
""",
        PYTHONPATH=str(SUPPORT),
    )
    assert told == {"wrong": [], "how": "refused"}


def test_loaded_late_it_sees_nothing_made_but_sets_what_lives() -> None:
    told, _ = run(
        """
t = Transport.load(); l = serve(); c = socket.create_connection(l.getsockname()); a, _ = l.accept()
before = len(t.connections())
done = t.set_socket(c.fileno(), inode(c), dscp=10, rate_Bps=5_000_000)
tell(sees=t.sees_sockets, before=before, tos=tos(c), errno=done.errno, how=known(c).how,
     rate=known(c).rate_Bps, originals=[done.original_tos, done.original_rate_Bps])
""",
        preload=False,
    )
    expected = {"sees": False, "before": 0, "tos": 40, "errno": 0, "how": "live_option"}
    assert told == expected | {"rate": 5_000_000, "originals": [0, None]}


def test_ports_of_stores_in_the_environment() -> None:
    env = {"MASTER_PORT": "29500", "PET_RDZV_ENDPOINT": "[::1]:29400", "CRUX_STORE": "none"}
    assert store_ports(env) == {29500, 29400}
    assert store_ports({"CRUX_STORE": "tcp://10.0.0.1:29410"}) == {29410}
    assert store_ports({"MASTER_PORT": "", "PET_RDZV_ENDPOINT": "node7"}) == set()


def test_routes_from_a_file_with_one_warning_for_its_mistakes(tmp_path: Path) -> None:
    routes = tmp_path / "routes"
    routes.write_text("10.1.0.2 dscp 99\n127.0.0.1 dscp 46 rate 3000000 # ours\nnonsense\n")
    told, errors = run(
        """
l = serve(); c = socket.create_connection(l.getsockname()); tell(tos=tos(c), rate=known(c).rate_Bps)
""",
        CRUX_TRANSPORT_ROUTES=str(routes),
        CRUX_TRANSPORT_STEER_ALL="1",
    )
    assert told == {"tos": 184, "rate": 3_000_000}
    assert errors.count("\n") == 1
    assert "line 1: '99' is no DSCP" in errors
    assert "lines ignored: 2" in errors


@pytest.mark.parametrize("kind", ["missing", "fifo", "device", "folder", "huge"])
def test_a_file_that_cannot_be_read_is_told_once(tmp_path: Path, kind: str) -> None:
    missing = str(tmp_path / kind)
    if kind == "fifo":
        os.mkfifo(missing)
    elif kind == "device":
        os.symlink("/dev/zero", missing)
    elif kind == "folder":
        os.mkdir(missing)
    elif kind == "huge":
        with open(missing, "wb") as file:
            file.truncate(1 << 40)
    told, errors = run(
        "l = serve(); tell(made=bool(socket.create_connection(l.getsockname())))",
        CRUX_TRANSPORT_ROUTES=missing,
    )
    assert told == {"made": True}
    assert errors.count("\n") == 1
    assert missing in errors


def test_a_line_for_each_steered_connection_where_asked() -> None:
    _, errors = run(
        """
t = Transport.load(); t.set_routes([Route("127.0.0.1", dscp=46)]); l = serve()
made = [socket.create_connection(l.getsockname()) for _ in range(3)]
tell()
""",
        CRUX_TRANSPORT_STEER_ALL="1",
        CRUX_TRANSPORT_LOG="1",
    )
    assert len(re.findall(r"crux_transport: .* to 127\.0\.0\.1 .* dscp 46", errors)) == 3


@pytest.mark.parametrize("switch", [{"CRUX_TRANSPORT": "0"}, {"CRUX_DISABLE": "1"}])
def test_switched_off_it_sees_and_changes_nothing(switch: dict[str, str]) -> None:
    told, _ = run(
        """
t = Transport.load(); t.set_routes([Route("127.0.0.1", dscp=46)])
l = serve(); c = socket.create_connection(l.getsockname())
tell(sees=t.sees_sockets, tos=tos(c), count=len(t.connections()))
""",
        CRUX_TRANSPORT_STEER_ALL="1",
        **switch,
    )
    assert told == {"sees": False, "tos": 0, "count": 0}


def test_a_forked_child_starts_empty_and_works() -> None:
    told, _ = run("""
import threading
t = Transport.load(); l = serve(); made = [socket.create_connection(l.getsockname())]
stop = threading.Event()
def churn():
    while not stop.is_set():
        socket.create_connection(l.getsockname()).close(); l.accept()[0].close()
threads = [threading.Thread(target=churn) for _ in range(2)]
for thread in threads: thread.start()
results = []
for _ in range(50):
    r, w = os.pipe()
    if (child := os.fork()) == 0:
        inherited = len(t.connections())
        own = socket.create_connection(l.getsockname())
        os.write(w, json.dumps([inherited, len(t.connections())]).encode()); os._exit(0)
    os.close(w); results.append(json.loads(os.read(r, 100))); os.close(r); os.waitpid(child, 0)
stop.set()
for thread in threads: thread.join()
tell(results=results, parent=known(made[0]) is not None)
""")
    assert told == {"results": [[0, 1]] * 50, "parent": True}


def test_a_connection_vanishes_when_it_is_closed_and_its_number_is_reused() -> None:
    told, _ = run("""
t = Transport.load(); l = serve(); first = socket.create_connection(l.getsockname())
fd, old = first.fileno(), inode(first); first.close()
gone = all(c.id != old for c in t.connections())
second = socket.create_connection(l.getsockname())
tell(gone=gone, reused=second.fileno() == fd, ids=[c.id for c in t.connections() if c.fd == fd],
     now=inode(second), stale=t.set_socket(fd, old, dscp=8).errno, tos=tos(second))
""")
    assert told["gone"]
    assert told["reused"]
    assert told["ids"] == [told["now"]]
    assert (told["stale"], told["tos"]) == (errno.ENOENT, 0)


def test_a_connection_attempt_in_progress_comes_through_unchanged() -> None:
    told, _ = run(
        """
import errno, select
t = Transport.load(); t.set_routes([Route("127.0.0.1", dscp=46)]); l = serve()
s = socket.socket(); s.setblocking(False); first = s.connect_ex(l.getsockname())
select.select([], [s], [], 10); again = s.connect_ex(l.getsockname())
dead = serve(); name = dead.getsockname(); dead.close()
tell(first=first, again=again, blocking=s.getblocking(), how=known(s).how,
     refused=socket.socket().connect_ex(name))
""",
        CRUX_TRANSPORT_STEER_ALL="1",
    )
    expected = {"first": errno.EINPROGRESS, "again": 0, "refused": errno.ECONNREFUSED}
    assert told == expected | {"blocking": False, "how": "at_connect"}


def test_a_wild_pointer_gets_the_kernels_answer() -> None:
    program = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def pages(protection, n): return libc.mmap(None, ctypes.c_size_t(n << 12), protection, 0x22, -1, 0)
base = pages(3, 2); libc.munmap(ctypes.c_void_p(base + 4096), ctypes.c_size_t(4096))
hidden = pages(0, 1); name = bytes([2, 0, 0, 9, 127, 0, 0, 1]) + bytes(8)
for at in (base, base + 4080): ctypes.memmove(at, name, 16)
seen = []
for at in (0, 1, hidden, base, base + 4080, base + 4088, base + 4095, 2**47 - 1, 2**63):
    for size in (0, 1, 2, 8, 16, 28, 128, 2**31 - 1, 2**32 - 1):
        s = socket.socket(); s.setblocking(False); ctypes.set_errno(0)
        done = libc.connect(s.fileno(), ctypes.c_void_p(at), ctypes.c_uint32(size))
        seen.append([done, ctypes.get_errno()])
tell(seen=seen)
"""
    with_it, _ = run(program, CRUX_TRANSPORT_STEER_ALL="1")
    without, _ = run(program, preload=False)
    assert with_it == without
    assert [-1, errno.EFAULT] in with_it["seen"]


def test_a_search_in_vain_is_bounded_and_told() -> None:
    program = """
import time
t = Transport.load(); l = serve()
def seconds():
    begin = time.perf_counter(); s = socket.create_connection(l.getsockname())
    return time.perf_counter() - begin, s
plain, _ = seconds()
t.set_routes([Route("127.0.0.1", hops=((1, "192.0.2.1"),))])
searched, s = seconds(); k = known(s)
tell(plain=plain, searched=searched, how=k.how, error=k.error, probes=k.probes)
"""
    short, _ = run(program, CRUX_TRANSPORT_STEER_ALL="1", CRUX_TRANSPORT_PROBE_MS="50")
    long, _ = run(program, CRUX_TRANSPORT_STEER_ALL="1", CRUX_TRANSPORT_PROBE_MS="800")
    for told in (short, long):
        assert told["how"] == "refused"
        assert told["error"] in (errno.ETIMEDOUT, errno.ERANGE)
        assert told["probes"] > 0
    if long["error"] == errno.ETIMEDOUT:
        assert long["searched"] > 4 * short["searched"]


def _send_s(fd_rate_Bps: int, nbytes: int) -> float:
    library = Transport.load()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
    ):
        receiver, _ = listener.accept()
        with receiver:
            inode = os.fstat(sender.fileno()).st_ino
            assert library.set_socket(sender.fileno(), inode, rate_Bps=fd_rate_Bps).errno == 0
            begin = time.perf_counter()
            if (child := os.fork()) == 0:
                sender.sendall(bytes(nbytes))
                os._exit(0)
            left = nbytes
            while left:
                left -= len(receiver.recv(1 << 16))
            elapsed = time.perf_counter() - begin
            os.waitpid(child, 0)
            return elapsed


def test_pacing_really_limits() -> None:
    nbytes, slow_Bps = 8_000_000, 8_000_000
    # A busy machine only lengthens what it sends.
    fast_s = min(_send_s(4 * slow_Bps, nbytes) for _ in range(3))
    slow_s = min(_send_s(slow_Bps, nbytes) for _ in range(2))
    assert 2 < slow_s / fast_s < 6


@pytest.mark.parametrize(
    "values",
    [
        {"destination": "host"},
        {"destination": "10.0.0.1", "hops": ((0, "10.0.0.2"),)},
        {"destination": "10.0.0.1", "hops": ((2, "spine"),)},
        {"destination": "10.0.0.1", "hops": tuple((2, f"10.0.0.{i}") for i in range(17))},
        {"destination": "10.0.0.1", "dscp": 64},
        {"destination": "10.0.0.1", "rate_Bps": 0},
        {"destination": "10.0.0.1", "udp_ports": (0,)},
    ],
)
def test_a_route_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Route(**values)


def test_refused_requests_say_so() -> None:
    library = Transport.load()
    with pytest.raises(TransportError, match="Invalid argument"):
        library.set_port_range(80, 90)
    with pytest.raises(TransportError):
        library.set_port_range(20000, 70000)
    with pytest.raises(TransportError, match="set_routes"):
        library.set_routes([Route("0.0.0.0")])
    library.set_routes([])


def test_a_library_that_is_missing_or_foreign_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transport, "LIBRARY", tmp_path / "libcrux_transport.so")
    with pytest.raises(TransportError, match="pip install"):
        Transport.load.__wrapped__()
    monkeypatch.setattr(transport, "LIBRARY", LIBRARY)
    monkeypatch.setattr(transport, "_ABI", 999)
    with pytest.raises(TransportError, match="rebuild"):
        Transport.load.__wrapped__()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_structures_are_the_headers(tmp_path: Path) -> None:
    structures = {
        "crux_hop": transport._Hop,
        "crux_route": transport._Route,
        "crux_connection": transport._Connection,
        "crux_socket_setting": transport._SocketSetting,
    }
    lines = [f'#include "{HEADER}"', "#include <stdio.h>", "int main(void) {"]
    expected = [("abi", transport._ABI)]
    lines.append('printf("abi %d\\n", CRUX_TRANSPORT_ABI);')
    for name, structure in structures.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        expected.append((name, ctypes.sizeof(structure)))
        for field, *_ in structure._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));')
            expected.append((f"{name}.{field}", getattr(structure, field).offset))
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["cc", "-Wall", "-Werror", source, "-o", tmp_path / "layout"], check=True)
    out = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert [(n, int(v)) for n, v in (line.split() for line in out.splitlines())] == expected


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_it_brings_no_runtime_and_shows_only_its_own_names() -> None:
    def readelf(option: str) -> str:
        argv = ["readelf", "-W", option, LIBRARY]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    dynamic = readelf("-d")
    assert "[libcrux_transport.so]" in dynamic
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    assert not [name for name in needed if re.match(r"lib(torch|ibverbs|python|cuda)", name)]
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines()]
    shown = {s[7] for s in symbols if len(s) > 7 and s[4] in ("GLOBAL", "WEAK") and s[6] != "UND"}
    others = {name for name in shown if not name.startswith("crux_")}
    assert others == {"connect", "accept", "accept4"}
