"""Runs programs in the guest and writes down what they did; starts and ends captures."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.rdma.step import Process, Step, write_step

#: Where perftest's and ibverbs-utils' servers wait for their client.
EXCHANGE_PORT = 18515
#: So many equal answers in a row, a second apart, say that tcpdump has nothing more to write.
STILL = 10
_LISTENING = "0A"
_COUNTS = re.compile(r"(\d+) packets? captured, (\d+) packets? received")


class Recorder:
    """Writes the steps of one run of the guest to ``folder``, by default the working directory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.cwd()

    def run(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        **facts: Any,
    ) -> Process:
        """Run one program to its end."""
        begin_s = time.time()
        done = _finish(_start(argv, env), argv, time.monotonic() + timeout_s)
        self._write(name, begin_s, [done], facts)
        return done

    def exchange(
        self,
        name: str,
        server: Sequence[str],
        client: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        **facts: Any,
    ) -> tuple[Process, Process]:
        """Run a server, and its client as soon as the server listens; both to their end."""
        begin_s = time.time()
        deadline = time.monotonic() + timeout_s
        serving = _start(server, env)
        wait_for(lambda: _listens(EXCHANGE_PORT) or serving.poll() is not None, deadline)
        done = _finish(_start(client, env), client, deadline)
        both = [_finish(serving, server, deadline), done]
        self._write(name, begin_s, both, facts)
        return both[0], both[1]

    def note(self, name: str, **facts: Any) -> None:
        """Write down something that is no program."""
        self._write(name, time.time(), [], facts)

    def _write(
        self, name: str, begin_s: float, processes: list[Process], facts: dict[str, Any]
    ) -> None:
        end_s = time.time()
        boot_s = end_s - time.monotonic()
        write_step(self._folder, Step(name, begin_s, end_s, boot_s, processes, facts))


class Capture:
    """The RoCEv2 packets that cross ``interface``, into ``file``, while it is open."""

    def __init__(self, file: Path, interface: str, namespace: str | None = None) -> None:
        self._file = file
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        # Packets come out as they come in; 96 bytes hold all headers. It does not open the file
        # itself, since it would want to give it to another user.
        self._argv = [*inside, "tcpdump", "-i", interface, "--immediate-mode", "-U", "-s", "96"]
        self._argv += ["-B", "32768", "-w", "-", "udp", "port", "4791"]
        self._said = file.with_suffix(".tcpdump")

    def __enter__(self) -> Capture:
        with self._file.open("wb") as file, self._said.open("wb") as said:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=file, stderr=said
            )
        wait_for(lambda: "listening on" in self._said.read_text(), time.monotonic() + 30)
        return self

    def settle(self) -> None:
        """Let tcpdump, which is slower than what it listens to, catch up.

        It has caught up if it has written all that it received, or if it stands still: the kernel
        may count a packet as received that it never hands over.

        Raises:
            TimeoutError: it does not say how far it is.
        """
        answers: list[tuple[str, str]] = []
        while True:
            deadline = time.monotonic() + 60
            told = len(self._counts())
            self._process.send_signal(signal.SIGUSR1)
            wait_for(lambda told=told: len(self._counts()) > told, deadline)
            answers.append(self._counts()[-1])
            captured, received = answers[-1]
            stands_still = len(answers) >= STILL and len(set(answers[-STILL:])) == 1
            if captured == received or stands_still:
                return
            time.sleep(1)

    def _counts(self) -> list[tuple[str, str]]:
        """What tcpdump has said each time that it was asked: packets written, and received."""
        return _COUNTS.findall(self._said.read_text())

    def __exit__(self, *_: object) -> None:
        self.settle()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)


def wait_for(condition: Callable[[], bool], deadline: float) -> None:
    """Wait until ``condition`` holds.

    Raises:
        TimeoutError: it did not before ``deadline`` of the monotonic clock.
    """
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.02)


def _start(argv: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _finish(process: subprocess.Popen[str], argv: Sequence[str], deadline: float) -> Process:
    try:
        stdout, stderr = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        status = None
    return Process(list(argv), status, stdout, stderr)


def _listens(port: int) -> bool:
    rows = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
    ]
    return any(int(row[1].rpartition(":")[2], 16) == port and row[3] == _LISTENING for row in rows)
