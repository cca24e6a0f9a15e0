"""A discovery from its first message to its last: who takes part, the tasks, and the state file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.console import Console

from crux_torch._version import __version__
from crux_torch.cli.discover.channel import Channel, Process
from crux_torch.files import read_file
from crux_torch.network.discover.fragment import SeenHost
from crux_torch.network.discover.plan import Plan, PlanRules
from crux_torch.network.discover.tasks import DiscoverError, Done, Hello, Leave, Outcome, Sounded
from crux_torch.words import listed

#: Seconds between two lines where there is no terminal.
PERIOD_S = 5.0


class Progress:
    """Says how far a discovery is.

    Args:
        say: called with each line that is due.
        period_s: least time between two lines.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._period_s, self._clock = say, period_s, clock
        self._next_s = 0.0
        self._began: tuple[float, int] | None = None

    def meeting(self, came: int, size: int) -> None:
        """Take note of the processes that have come."""
        self._tell(f"hosts: {came} of {size} are there", due=came == size)

    def watch(self, plan: Plan) -> None:
        """Take note of a step of ``plan``."""
        self._tell(self.line(plan))

    def line(self, plan: Plan) -> str:
        """Returns how far ``plan`` is, and the time left once there is a measure for it."""
        if plan.phase == "leaves":
            placed, ends = plan.placed
            return f"leaves: {plan.leaves}, hosts placed: {placed} of {ends}, probes: {plan.sent}"
        done, count = plan.searches
        now = self._clock()
        if self._began is None:
            self._began = now, done
        since, before = self._began
        left = ""
        if done > before:
            left = f", {(now - since) / (done - before) * (count - done):.0f} s left"
        return f"leaves: {plan.leaves}, paths: {done} of {count} pairs, probes: {plan.sent}{left}"

    def _tell(self, line: str, *, due: bool = False) -> None:
        if due or self._clock() >= self._next_s:
            self._next_s = self._clock() + self._period_s
            self._say(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """Shows progress on standard error."""
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty():
        yield Progress(lambda line: console.print(line, soft_wrap=True), PERIOD_S)
        return
    with console.status("starting") as status:
        yield Progress(status.update, 0.1)


#: Seconds beyond the limit of a task after which a silent host counts as gone.
SILENCE_S = 60.0
_POLL_S = 0.5
MAX_STATE_BYTES = 1 << 30
_NAMES = 5


@dataclass(frozen=True)
class Met:
    """The processes that take part, one a host, and what they told of themselves."""

    processes: dict[str, Process]
    told: dict[str, Hello]

    @property
    def hosts(self) -> tuple[SeenHost, ...]:
        """The hosts by name, so that the order in which they came plays no part."""
        return tuple(self.told[name].host for name in sorted(self.told))


def meet(
    channel: Channel,
    size: int,
    patience_s: float,
    watch: Callable[[int, int], None] = lambda _came, _all: None,
) -> Met:
    """Waits until ``size`` processes have said hello, and keeps one a host.

    Args:
        watch: called with the number of those that came, and of all.

    Raises:
        DiscoverError: a process is missing, or two hosts have one name.
    """
    came: dict[Process, Hello] = {}
    gone: list[Process] = []
    until = time.monotonic() + patience_s
    while len(came) < size and (left := until - time.monotonic()) > 0:
        for process, report in channel.receive(min(left, _POLL_S)):
            if isinstance(report, Hello) and report.token == process.token:
                came[process] = report
                continue
            came.pop(process, None)
            gone.append(process)
            channel.drop(process)
        if any(process.child is not None for process in gone):
            break
        watch(len(came), size)
    if len(came) < size:
        raise DiscoverError(_missing(channel, size, came, gone))
    if strange := [h for h in came.values() if h.release != __version__]:
        raise DiscoverError(
            f"{strange[0].host.name} has release {strange[0].release} of crux_torch, and this host "
            f"{__version__}: install the same on all"
        )
    channel.stop_listening()
    for stranger in [process for process in channel.processes if process not in came]:
        channel.drop(stranger)
    return _one_a_host(channel, came)


def _missing(
    channel: Channel, size: int, came: dict[Process, Hello], gone: Sequence[Process]
) -> str:
    silent = [p for p in channel.processes if p not in came and p.label]
    failed = [p for p in gone if p.label]
    said = next((f" ({p.label}: {p.last_words})" for p in failed if p.last_words), "")
    if failed or silent:
        named = listed([p.label for p in [*failed, *silent]], _NAMES)
        if not failed:
            return f"no answer from {named}: log in there by hand, or leave them out of --hosts"
        labels = listed([p.label for p in failed], _NAMES)
        return f"can't run on {labels}{said}: see that `ssh HOST crux --version` works there"
    local = next((p.last_words for p in gone if p.last_words), "")
    if local:
        return f"this host can't probe: {local}"
    ranks = {hello.rank for hello in came.values()}
    absent = listed([str(rank) for rank in range(size) if rank not in ranks], _NAMES)
    return f"{len(came)} of {size} ranks came; missing: {absent}. Is --wait long enough?"


def _one_a_host(channel: Channel, came: dict[Process, Hello]) -> Met:
    met = Met({}, {})
    for process, hello in sorted(came.items(), key=lambda each: each[1].rank):
        name = hello.host.name
        other = met.told.get(name)
        if other is None:
            met.processes[name], met.told[name] = process, hello
        elif other.machine == hello.machine:
            channel.drop(process, Leave())
        else:
            raise DiscoverError(
                f"two hosts are called {name!r}: give them names with CRUX_HOST, or by --hosts"
            )
    machines: dict[str, str] = {}
    for name, hello in met.told.items():
        if machines.setdefault(hello.machine, name) != name:
            raise DiscoverError(
                f"{machines[hello.machine]!r} and {name!r} are the same host: name it once"
            )
    return met


def run(
    channel: Channel,
    met: Met,
    plan: Plan,
    record: Callable[[Outcome], None],
    watch: Callable[[Plan], None],
) -> None:
    """Does the tasks of ``plan`` until all are done.

    Args:
        record: called with each outcome.
        watch: called after each step.

    Raises:
        DiscoverError: no host is left.
    """
    name_of = {process: name for name, process in met.processes.items()}
    heard: dict[str, float] = {}
    limit_s = plan.rules.time_limit_s + SILENCE_S
    while plan.phase != "done":
        now = time.monotonic()
        for host, task in plan.start():
            heard[host] = now
            if not channel.send(met.processes[host], task):
                plan.lose(host)
        for process, report in channel.receive(_POLL_S):
            name = name_of.get(process)
            if name is None:
                channel.drop(process)
                continue
            heard[name] = time.monotonic()
            if report is None or isinstance(report, Hello):
                plan.lose(name)
                heard.pop(name)
                channel.drop(process)
            elif isinstance(report, Done):
                plan.finish(name)
                heard.pop(name)
            elif report.source.host == name:
                plan.take(report)
                record(report)
        for host in [h for h, since in heard.items() if time.monotonic() - since > limit_s]:
            plan.lose(host)
            heard.pop(host)
            channel.drop(met.processes[host])
        watch(plan)


class _Header(msgspec.Struct):
    version: int
    hosts: tuple[SeenHost, ...]
    ipv6: bool


class _Line(msgspec.Struct):
    outcome: Outcome


class State:
    """File that holds every outcome from the moment when it is known, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def begin(self, hosts: Sequence[SeenHost], rules: PlanRules) -> None:
        """Start a new file.

        Raises:
            DiscoverError: it can't be written.
        """
        header = _Header(1, tuple(hosts), rules.ipv6)
        self._open("wb")
        self._write(msgspec.json.encode(header))

    def resume(self, hosts: Sequence[SeenHost], rules: PlanRules) -> list[Outcome]:
        """Returns the outcomes in the file, and goes on in it.

        Raises:
            DiscoverError: there is none, or it is of other hosts.
        """
        try:
            lines = read_file(self.path, MAX_STATE_BYTES).split(b"\n")
        except OSError as error:
            raise DiscoverError(
                f"nothing to resume: {self.path}: {error.strerror}. Begin without --resume"
            ) from None
        try:
            header = msgspec.json.decode(lines[0], type=_Header)
        except msgspec.MsgspecError:
            raise DiscoverError(f"{self.path} is no state of a discovery") from None
        if _addresses(header.hosts) != _addresses(hosts) or header.ipv6 != rules.ipv6:
            raise DiscoverError(
                f"{self.path} is of other hosts or addresses: begin without --resume"
            )
        found: list[Outcome] = []
        # The last line may have been cut.
        for line in lines[1:-1]:
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(line, type=_Line).outcome)
        self._open("ab")
        assert self._file is not None
        self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        # Searches that ended too early for what is asked for now are done again.
        return [
            outcome
            for outcome in found
            if isinstance(outcome, Sounded)
            or (outcome.pair is not None and outcome.pair.confidence >= rules.confidence)
        ]

    def add(self, outcome: Outcome) -> None:
        self._write(msgspec.json.encode(_Line(outcome)))

    def remove(self) -> None:
        """Remove the file: the discovery is complete."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, mode: str) -> None:
        self.close()
        try:
            self._file = open(self.path, mode, buffering=0)  # type: ignore[assignment]  # noqa: SIM115
        except OSError as error:
            raise DiscoverError(f"{self.path}: {error.strerror}") from None

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise DiscoverError(f"{self.path}: {error.strerror}") from None


def _addresses(hosts: Sequence[SeenHost]) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(host.name, nic.name, nic.addresses) for host in hosts for nic in host.nics}
