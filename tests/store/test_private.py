"""Two users on one host: the store, its folder and its socket are one user's, or a group's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import until
from other_user import GROUP, A, B, C, Program, needs_other_users, output
from store_server import works

from crux_torch import own_folders
from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.own_folders import FolderError, group_id, open_folder, usable_folder
from crux_torch.settings import Settings
from crux_torch.store.endpoint import open_store, sharing
from crux_torch.store.host import StoreHost
from crux_torch.store.unix_place import UNIX, UnixPlace, listening, parse_unix

#: One user's store, and what another program of that user or another does with it.
HOST = """
import sys, time
from crux_torch.store.host import StoreHost
host = StoreHost("unix:", group="{group}", poll_s=0.05, linger_s=0.5)
host.start()
while host.state not in ("hosting", "standby"): time.sleep(0.02)
print(host.state, flush=True)
sys.stdin.read()
"""
PUT = """
import time
from crux_torch.errors import StoreError
from crux_torch.store.endpoint import open_store
store = open_store("{endpoint}", group="{group}", timeout_s=20.0)
for _ in range(200):
    try:
        before = store.get("k"); store.put("k", b"{value}"); print(before); break
    except StoreError as error:
        if error.cause.name not in ("ABSENT", "CUT", "BUSY"): print(error.cause.name, error); break
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This host's places, in a folder of the test: ``memory`` for all users, and ``sessions``."""
    for name, mode in (("memory", 0o1777), ("sessions", 0o755), ("home", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setattr(own_folders, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(own_folders, "SESSIONS", tmp_path / "sessions")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that all users of this host can enter."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def own(places: Path) -> Path:
    return places / "memory" / f"crux-{os.geteuid()}"


@pytest.fixture
def host() -> Iterator[StoreHost]:
    host = StoreHost(UNIX, poll_s=0.05, linger_s=0.5)
    host.start()
    yield host
    host.stop()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_default_store_is_its_users_alone(places: Path, host: StoreHost) -> None:
    store = open_store(Settings().store)
    until(lambda: works(store), what="an answer")
    assert mode(own(places)) == 0o700
    assert mode(own(places) / "store") == mode(own(places) / "store.lock") == 0o600
    assert stat.S_ISSOCK((own(places) / "store").lstat().st_mode)
    assert sharing(Settings().store, "", "") == ""
    host.stop()
    store.close()
    until(lambda: not (own(places) / "store").exists(), what="the end of a store without clients")


def test_a_session_has_its_runtime_directory_and_others_find_its_store(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, memory = os.geteuid(), own(places)
    session = places / "sessions" / str(uid)
    assert own_folders.own_folders() == (memory,)
    session.mkdir(mode=0o700)
    assert own_folders.own_folders() == (session / "crux", memory)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert own_folders.own_folders() == (session / "crux", memory)
    elsewhere = places / "elsewhere"
    for unfit in ("elsewhere", str(elsewhere)):
        # Relative, and not there.
        monkeypatch.setenv("XDG_RUNTIME_DIR", unfit)
        assert own_folders.own_folders() == (session / "crux", memory)
    elsewhere.mkdir(mode=0o700)
    assert own_folders.own_folders() == (elsewhere / "crux",)
    elsewhere.chmod(0o777)
    assert own_folders.own_folders() == (session / "crux", memory)
    # The links of a host are where every process of the user sees them.
    assert usable_folder() == memory


def test_a_store_that_began_outside_a_session_is_found_inside(
    places: Path, host: StoreHost
) -> None:
    until(lambda: host.state == "hosting", what="hosting")
    session = places / "sessions" / str(os.geteuid())
    session.mkdir(mode=0o700)
    second = StoreHost(UNIX, poll_s=0.05)
    second.start()
    until(lambda: second.state == "standby", what="standby")
    store = open_store(UNIX)
    until(lambda: works(store), what="an answer")
    second.stop()
    store.close()


@pytest.mark.slow
def test_who_ends_the_session_takes_no_store_from_the_jobs(places: Path) -> None:
    session = places / "sessions" / str(os.geteuid())
    session.mkdir(mode=0o700)
    host = StoreHost(UNIX, poll_s=0.05, linger_s=0.5)
    host.start()
    store = open_store(UNIX)
    until(lambda: works(store), what="an answer")
    first = host.pid
    shutil.rmtree(session)
    until(lambda: host.pid not in (None, first), what="another server")
    assert (own(places) / "store").exists()
    until(lambda: works(store), what="an answer of the other one")
    host.stop()
    store.close()


def test_a_server_that_stands_still_keeps_its_place(places: Path, host: StoreHost) -> None:
    until(lambda: host.state == "hosting", what="hosting")
    assert host.pid is not None
    os.kill(host.pid, signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="has"), listening(UnixPlace(), 1):
            pass
        with pytest.raises(StoreError, match="no answer within") as told:
            open_store(UNIX, timeout_s=0.2).get("k")
        assert told.value.cause is Cause.SILENT
    finally:
        os.kill(host.pid, signal.SIGCONT)


def test_a_path_of_any_length_will_do(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 100] * 4)
    folder.mkdir(parents=True)
    endpoint = f"unix://{folder}/store"
    host = StoreHost(endpoint, poll_s=0.05, linger_s=0.5)
    host.start()
    store = open_store(endpoint)
    until(lambda: works(store), what="an answer")
    host.stop()
    store.close()


@pytest.mark.parametrize(
    "endpoint", ["unix:/x", "unix://x/y", "unix:///", "unix:///x", "unix:///x/"]
)
def test_other_forms_are_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="expected unix:"):
        parse_unix(endpoint)


def test_an_unknown_group_is_named() -> None:
    assert group_id("") is None
    assert group_id("0") == group_id("root") == 0
    with pytest.raises(SettingsError, match="CRUX_STORE_GROUP='no-such-group'"):
        group_id("no-such-group")


def refusal(folder: Path, group: int | None = None) -> str:
    """Why the folder is refused, by a client and a host alike."""
    told = []
    for make in (False, True):
        with pytest.raises(FolderError) as caught:
            os.close(open_folder(folder, group, make=make))
        told.append(str(caught.value))
    assert told[0] == told[1]
    return told[0]


def test_a_folder_that_is_not_private_is_refused(places: Path) -> None:
    folder = own(places)
    folder.symlink_to(places / "home")
    assert "a link" in refusal(folder)
    folder.unlink()
    folder.touch()
    assert "no folder" in refusal(folder)
    folder.unlink()
    folder.mkdir(mode=0o755)
    assert "chmod 700" in refusal(folder)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, B, B)
        assert f"belongs to user {B}" in refusal(folder)
        assert not (places / "home").joinpath("store").exists()


def test_a_named_folder_must_not_be_writable_by_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    endpoint = f"unix://{folder}/store"
    for wide in (0o777, 0o1777, 0o775):
        folder.chmod(wide)
        with pytest.raises(StoreError, match="others can replace") as told:
            open_store(endpoint).get("k")
        assert told.value.cause is Cause.FOLDER
        with pytest.raises(FolderError), listening(parse_unix(endpoint), 1):
            pass
    folder.chmod(0o755)
    (folder / "store").write_text("a file of the user's")
    with pytest.raises(FolderError, match="no socket"), listening(parse_unix(endpoint), 1):
        pass
    assert (folder / "store").read_text() == "a file of the user's"


@needs_other_users
def test_a_user_who_takes_the_name_first_gets_nothing(places: Path) -> None:
    """The user's store begins in the home, where nobody can take its place."""
    own(places).mkdir()
    os.chown(own(places), B, B)
    host = StoreHost(UNIX, poll_s=0.05, linger_s=0.5)
    host.start()
    store = open_store(UNIX)
    until(lambda: works(store), what="an answer")
    (spare,) = own_folders.spare_folder()
    assert spare.parent == places / "home"
    assert (spare / "store").exists()
    # Also once the name is free, because the store goes on there.
    own(places).rmdir()
    other = open_store(UNIX)
    until(lambda: works(other), what="an answer")
    store.close()
    other.close()
    host.stop()
    # Shared memory has no such place: links are off, and say why.
    own(places).mkdir()
    os.chown(own(places), B, B)
    with pytest.raises(FolderError, match=f"belongs to user {B}"):
        usable_folder()


LISTEN_AS = """
import os, socket, sys
os.chdir(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind("store")
os.chmod("store", 0o777)
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
listener.listen()
print("ready", flush=True)
peer, _ = listener.accept()
print(len(peer.recv(1000)), flush=True)
"""


@needs_other_users
def test_a_client_tells_nothing_to_another_users_server(tmp_path: Path) -> None:
    code = LISTEN_AS.format(uid=B)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "ready\n"
        store = open_store(f"unix://{tmp_path}/store")
        with pytest.raises(StoreError, match=f"user {B} has") as told:
            store.get("k")
        store.close()
        assert told.value.cause is Cause.FOREIGN
        assert squatter.stdout.readline() == "0\n"


@needs_other_users
def test_a_server_answers_no_other_user_even_where_the_files_let_him(open_place: Path) -> None:
    endpoint = f"unix://{open_place}/named"
    named = StoreHost(endpoint, poll_s=0.05, linger_s=0.5)
    named.start()
    store = open_store(endpoint)
    until(lambda: works(store), what="an answer")
    ask = f"""
import socket
s = socket.socket(socket.AF_UNIX)
try:
    s.connect("{open_place}/named"); s.settimeout(60); print("closed", s.recv(10))
except OSError as error: print(error)
"""
    assert "Permission denied" in output(B, ask)
    (open_place / "named").chmod(0o777)
    assert output(B, ask) in ("closed b''", "[Errno 104] Connection reset by peer")
    assert works(store)
    store.close()
    named.stop()


@pytest.fixture
def real_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other users' programs see the host's own places."""
    monkeypatch.undo()
    yield
    for name in (f"crux-{A}", f"crux-{B}", f"crux-group-{GROUP}"):
        shutil.rmtree(Path("/dev/shm", name), ignore_errors=True)


@needs_other_users
@pytest.mark.slow
def test_two_users_of_one_host_have_two_stores(real_memory: None) -> None:
    code, put = HOST.format(group=""), PUT.format(endpoint=UNIX, group="", value="{value}")
    with Program(A, code) as one, Program(B, code) as other:
        assert (one.line(), other.line()) == ("hosting", "hosting")
        assert output(A, put.format(value="a")) == "None"
        assert output(B, put.format(value="b")) == "None"
        assert output(A, put.format(value="c")) == "b'a'"
        # Not even when he names the other's.
        there = PUT.format(endpoint=f"unix:///dev/shm/crux-{A}/store", group="", value="b")
        assert output(B, there).startswith("FOLDER")
        taken = f"import os; os.rename('/dev/shm/crux-{A}', '/dev/shm/mine')"
        assert "PermissionError" in output(B, taken) or "Operation not permitted" in output(
            B, taken
        )


@needs_other_users
@pytest.mark.slow
def test_a_group_shares_a_store_and_nobody_else_reads_it(real_memory: None) -> None:
    code, put = HOST.format(group=GROUP), PUT.format(endpoint=UNIX, group=GROUP, value="{value}")
    with Program(B, code, [GROUP]) as second:
        with Program(A, code, [GROUP]) as first:
            assert sorted((first.line(), second.line())) == ["hosting", "standby"]
            assert output(A, put.format(value="a"), [GROUP]) == "None"
            assert output(B, put.format(value="b"), [GROUP]) == "b'a'"
            assert output(C, put.format(value="c")).startswith("FOLDER")
            about = Path(f"/dev/shm/crux-group-{GROUP}").stat()
            assert (stat.S_IMODE(about.st_mode), about.st_gid) == (0o770, GROUP)
            about = Path(f"/dev/shm/crux-group-{GROUP}/store").stat()
            assert (stat.S_IMODE(about.st_mode), about.st_gid) == (0o660, GROUP)
            (server,) = settled(f"/dev/shm/crux-group-{GROUP}/store")
        # A member takes over from another one's dead server, whoever made folder and files.
        os.kill(server, signal.SIGKILL)
        assert output(B, put.format(value="b"), [GROUP]) == "None"


def servers(path: str) -> list[int]:
    """The servers of the socket at ``path``."""
    argument = f"--path={path}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def settled(path: str) -> list[int]:
    """The one server at ``path``, once one that nobody reached in time has ended."""
    until(lambda: len(servers(path)) == 1, what="one server")
    return servers(path)


@needs_other_users
@pytest.mark.slow
def test_nobody_takes_the_name_of_another_users_links(real_memory: None) -> None:
    pytest.importorskip("torch")
    # Its own link, and that of the group.
    join = f"""
import os, sys
from crux_torch import _C
from crux_torch.own_folders import usable_folder
gate = _C.link_gate()
for group in (None, {GROUP}):
    index = gate.join(str(usable_folder(group)), "c", "loop", str(os.getuid()))
    print(len(gate.holders(index)), flush=True)
sys.stdin.read()
"""
    with Program(A, join, [GROUP]) as one:
        assert (one.line(), one.line()) == ("1", "1")
        theirs = f"/dev/shm/crux-{A}/c~loop"
        assert "Permission denied" in output(B, f"open('{theirs}')")
        assert mode(Path(theirs)) == 0o600
        with Program(B, join, [GROUP]) as other:
            assert (other.line(), other.line()) == ("1", "2")
            assert mode(Path(f"/dev/shm/crux-group-{GROUP}/c~loop")) == 0o660
        stranger = f"from crux_torch.own_folders import usable_folder as u; print(u({GROUP}))"
        assert "FolderError" in output(C, stranger)


@pytest.mark.slow
def test_a_service_keeps_the_store_until_it_is_told_to_end(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/store"
    command = [sys.executable, "-m", "crux_torch.cli", "store", "serve", "--store", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        store = open_store(endpoint)
        until(lambda: works(store), what="an answer")
        (server,) = settled(f"{tmp_path}/store")
        os.kill(server, signal.SIGKILL)
        until(lambda: works(store), what="an answer of the next one")
        service.terminate()
        assert service.communicate(timeout=60) == (f"keeping the store {endpoint}\n", None)
        assert service.returncode == 0
        store.close()


def test_who_else_may_read_the_store_is_said() -> None:
    assert "any user of the host" in sharing("tcp://127.0.0.1:1", "", "")
    assert "any user of the host" in sharing("tcp://localhost:1", "", "")
    assert sharing("tcp://127.0.0.1:1", "file", "") == sharing("tcp://head:1", "", "") == ""
    assert sharing(UNIX, "", "lab") == "the store unix: is shared with all users of group lab"
    assert sharing("etcd://127.0.0.1:1", "", "") == sharing("none", "", "") == ""
