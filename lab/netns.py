"""Linux network namespaces: may this process make them, and what lives in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

NAMESPACES = Path("/run/netns")
USER_NAMESPACE_ENV = "CRUX_DEMO_USER_NAMESPACE"
#: A killed process is gone at once, but on a busy machine waits for a core to end on.
KILLED_WITHIN_S = 30.0

#: Everything that a fabric needs from the kernel, tried once on a throwaway pair of interfaces.
_TRIAL = """
netns add {a}
netns add {b}
link add port0 netns {a} type veth peer name port1 netns {b}
"""
_SHAPING_TRIAL = """
qdisc add dev port0 root handle 1: htb default 17
class add dev port0 parent 1: classid 1:1 htb rate 10mbit
qdisc add dev port0 parent 1:1 handle 10: bfifo limit 10000
filter add dev port0 parent 1: protocol ip prio 1 u32 match ip dsfield 0xe0 0xe0 flowid 1:1
"""


class NamespaceError(RuntimeError):
    """A command on a network namespace failed: which one, and what it said."""


def run_batch(tool: str, commands: str, namespace: str | None = None) -> str:
    """Run ``commands`` through ``ip -batch`` or ``tc -batch``.

    Raises:
        NamespaceError: the tool refused one of them.
    """
    argv = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(argv, input=commands, text=True, capture_output=True, check=False)
    if done.returncode:
        raise NamespaceError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def owner_prefix(pid: int, counter: int) -> str:
    """Prefix of the names that process ``pid`` gives: its start time tells it from a later one."""
    return f"crux-{pid}-{_start_ticks(pid)}-{counter}-"


_OWNED = re.compile(r"crux-(?P<pid>\d+)-(?P<start>\d+)-\d+-")


def remove_orphans() -> int:
    """Remove the namespaces of fabrics whose owner has died; how many there were."""
    orphans = []
    for name in named(""):
        owned = _OWNED.match(name)
        if owned and _start_ticks(int(owned["pid"])) != int(owned["start"]):
            orphans.append(name)
    remove(orphans)
    return len(orphans)


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does, so that it removes what it made."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def named(prefix: str) -> list[str]:
    """The network namespaces whose name begins with ``prefix``."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(p.name for p in NAMESPACES.iterdir() if p.name.startswith(prefix))


def remove(names: Iterable[str], grace_s: float = 3.0) -> None:
    """End what runs in these namespaces, then remove them."""
    names = list(names)
    if not names:
        return
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_WITHIN_S)):
        running = processes_in(names)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while running and time.monotonic() < deadline:
            time.sleep(0.02)
            running = processes_in(names)
    subprocess.run(
        ["ip", "-force", "-batch", "-"],
        input="".join(f"netns del {name}\n" for name in names),
        text=True,
        capture_output=True,
        check=False,
    )


def processes_in(names: Iterable[str]) -> list[int]:
    """The processes inside these network namespaces, this one excepted."""
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):
            inodes.add(os.stat(NAMESPACES / name).st_ino)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns" / "net").st_ino in inodes and not _is_zombie(entry):
                    found.append(int(entry.name))
    return found


@lru_cache(maxsize=1)
def available() -> tuple[bool, str]:
    """Whether this process can build a fabric, and if not, why."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return False, f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return False, "network namespaces need root"
    prefix = owner_prefix(os.getpid(), 0)
    a, b = prefix + "a", prefix + "b"
    try:
        run_batch("ip", _TRIAL.format(a=a, b=b))
        run_batch("tc", _SHAPING_TRIAL, a)
    except NamespaceError as error:
        return False, f"this kernel refuses what a fabric needs: {error}"
    finally:
        remove([name for name in (a, b) if (NAMESPACES / name).exists()])
    return True, ""


def user_namespace_available() -> tuple[bool, str]:
    """Whether this process could build a fabric inside an unprivileged user namespace."""
    if shutil.which("unshare") is None:
        return False, "unshare not found: install util-linux"
    trial = "from lab.netns import available; ok, why = available(); print(why); exit(not ok)"
    done = subprocess.run(
        _in_user_namespace([sys.executable, "-c", trial]),
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    return done.returncode == 0, (done.stdout.strip() or done.stderr.strip())


def enter_user_namespace(argv: list[str]) -> None:
    """Replace this process by ``argv``, run as root of a new user, mount and network namespace."""
    command = _in_user_namespace(argv)
    os.execvpe(command[0], command, {**os.environ, USER_NAMESPACE_ENV: "1"})


def _in_user_namespace(argv: list[str]) -> list[str]:
    # ip(8) keeps its names under /run/netns, which only the real root may write: cover it.
    cover = 'mount -t tmpfs tmpfs /run && mkdir -p /run/netns && exec "$@"'
    return ["unshare", "-Urnm", "--", "sh", "-c", cover, "sh", *argv]


def _start_ticks(pid: int) -> int:
    """When process ``pid`` started, in clock ticks since boot; -1 if there is none."""
    try:
        return int(_stat_fields(Path("/proc") / str(pid))[19])
    except OSError:
        return -1


def _is_zombie(process: Path) -> bool:
    return _stat_fields(process)[0] == "Z"


def _stat_fields(process: Path) -> list[str]:
    # The command name, second field, may itself hold spaces and parentheses.
    return (process / "stat").read_text().rpartition(")")[2].split()
