"""Messages to and from the processes that probe: lines of JSON, over pipes or a TCP connection."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from crux_torch.network.discover.tasks import MAX_MESSAGE_BYTES, Order, Report

_READ_BYTES = 1 << 16
#: Processes that may be connected and have said nothing yet.
BACKLOG = 1024
#: Seconds that a process has to end after its last order.
GRACE_S = 3.0
_LAST_WORDS_BYTES = 2000

_encode = msgspec.json.Encoder().encode
_report: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_order: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


@dataclass(eq=False)
class Process:
    """A process that probes, on this host or another.

    Attributes:
        label: host as the user named it; empty if the process came by itself.
        token: text that it has to bring with its first message.
        greeted: True once it has sent a message.
    """

    reads: int
    writes: int
    label: str = ""
    token: str = ""
    child: subprocess.Popen[bytes] | None = None
    connection: socket.socket | None = None
    errors: IO[bytes] | None = None
    greeted: bool = False
    held: bytearray = field(default_factory=bytearray)

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        if self.errors is None:
            return ""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


class Channel:
    """The connections of the one process that plans to all that probe."""

    def __init__(self) -> None:
        self._select = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._token = ""
        self.processes: list[Process] = []

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(self, argv: Sequence[str], label: str) -> Process:
        """Start a process that talks over its standard input and output.

        Raises:
            OSError: it can't be started.
        """
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        # Ctrl-C is for this process alone: it tells the others.
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        ends = child.stdout.fileno(), child.stdin.fileno()
        return self._add(Process(*ends, label=label, child=child, errors=errors))

    def listen(self, token: str) -> int:
        """Take connections from processes that bring ``token``; returns the port."""
        is_v6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
        self._listener.setblocking(False)
        self._token = token
        self._select.register(self._listener, selectors.EVENT_READ, None)
        return int(self._listener.getsockname()[1])

    def send(self, process: Process, order: Order) -> bool:
        """Send an order; False if the process is gone."""
        try:
            _write(process.writes, order)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> list[tuple[Process, Report | None]]:
        """Returns the reports that come within ``timeout_s``; None: the process is gone."""
        found: list[tuple[Process, Report | None]] = []
        for key, _ in self._select.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                found += [(key.data, report) for report in self._read(key.data)]
        return found

    def drop(self, process: Process, order: Order | None = None) -> None:
        """Disconnect a process after a last order."""
        if process not in self.processes:
            return
        if order is not None:
            self.send(process, order)
        self.processes.remove(process)
        self._select.unregister(process.reads)
        if process.connection is not None:
            process.connection.close()
        if process.child is not None:
            for pipe in (process.child.stdin, process.child.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def close(self, order: Order | None = None) -> None:
        """Disconnect all processes after a last order, and kill those that don't end."""
        children = [p.child for p in self.processes if p.child is not None]
        for process in list(self.processes):
            self.drop(process, order)
        until = time.monotonic() + GRACE_S
        for child in children:
            try:
                child.wait(max(0.05, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.stop_listening()

    def stop_listening(self) -> None:
        """Take no more connections."""
        if self._listener is not None:
            self._select.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _add(self, process: Process) -> Process:
        self.processes.append(process)
        self._select.register(process.reads, selectors.EVENT_READ, process)
        return process

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            # Orders are short, so writing never waits long.
            connection.settimeout(GRACE_S)
            fd = connection.fileno()
            self._add(Process(fd, fd, token=self._token, connection=connection))

    def _read(self, process: Process) -> list[Report | None]:
        try:
            read = os.read(process.reads, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            read = b""
        process.held += read
        *lines, rest = bytes(process.held).split(b"\n")
        process.held = bytearray(rest)
        found: list[Report | None] = []
        for line in lines:
            try:
                found.append(_report.decode(line))
                process.greeted = True
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                # Login scripts may greet first.
                if process.greeted:
                    return [*found, None]
        if not read or len(rest) > MAX_MESSAGE_BYTES:
            found.append(None)
        return found


class Superior:
    """The connection of a process that probes to the one that plans."""

    def __init__(self, reads: int, writes: int) -> None:
        self._in = os.fdopen(reads, "rb", closefd=False)
        self._writes = writes

    def report(self, report: Report) -> None:
        """Send a report.

        Raises:
            OSError: the process that plans is gone.
        """
        _write(self._writes, report)

    def next_order(self) -> Order | None:
        """Returns the next order; None if the process that plans is gone, or is another program."""
        line = self._in.readline(MAX_MESSAGE_BYTES)
        try:
            return _order.decode(line) if line.endswith(b"\n") else None
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None


def _write(fd: int, message: Any) -> None:
    left = memoryview(_encode(message) + b"\n")
    until = time.monotonic() + GRACE_S
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)
