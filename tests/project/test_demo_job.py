"""A job of the demo, steered from outside: paused, resumed, watched, ended; and the gain itself."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from control_fakes import until
from loopback import free_port
from training_job import alive

from lab import netns, sockets
from lab.fabric import Fabric, FabricSpec
from lab.job import TORCHRUN, Job, JobError, JobSpec
from lab.phases import Phase, durations, measure

pytestmark = pytest.mark.slow

_OK, _REASON = netns.available()


@contextmanager
def _running(job: Job) -> Iterator[Job]:
    def started() -> bool:
        job.check()
        return len(job.steps()) >= 2

    try:
        until(started, 90, "two steps")
        yield job
    finally:
        job.kill()


def _tiny(port: int, *flags: str) -> JobSpec:
    arguments = ("--steps", "100000", "--width", "64", "--accelerator-ms", "20", *flags)
    return JobSpec("tiny", "mlp", arguments, port)


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_is_steered_watched_and_ended_from_outside(tmp_path: Path) -> None:
    with _running(Job(_tiny(free_port()), tmp_path, TORCHRUN)) as job:
        workers = job.workers()
        assert len(workers) == 2

        with sockets.Sampler({"tiny": workers[:1]}) as sampler:
            before = len(job.steps())
            time.sleep(1.0)
            done = len(job.steps()) - before
        samples = sampler.samples["tiny"]
        moved = samples[-1][1] - samples[0][1]
        embedding, layers = 256 * 24, (32 * 24 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 256
        gradient_bytes = 4 * (embedding + layers)
        assert (done - 3) * gradient_bytes < moved < 1.1 * (done + 3) * gradient_bytes

        job.pause()
        time.sleep(0.5)
        halted = len(job.steps())
        time.sleep(0.5)
        assert len(job.steps()) == halted
        window = measure(Phase("again", ("tiny",)), {"tiny": job}, 5, 30)
        assert len(durations(job.steps(), [window])) >= 5

        job.pause()
        time.sleep(0.5)
        last = job.steps()[-1].step
        job.finish()
        assert job.wait(120) == [0, 0]
        assert last < job.steps()[-1].step <= last + 6
        with pytest.raises(JobError, match="tiny ended with code 0"):
            job.check()


def test_kill_leaves_no_process(tmp_path: Path) -> None:
    # Launchers that ignore SIGTERM, and their workers.
    stubborn = "trap '' TERM; sleep 600 & echo started; wait"
    job = Job(_tiny(free_port()), tmp_path, ("sh", "-c", stubborn))
    try:
        until(lambda: all(job.tail(r) == "started" for r in (0, 1)), 10, "the launchers")
        victims = job.processes()
        assert len(victims) == 4
    finally:
        job.kill(grace_s=0.3)
    until(lambda: not any(map(alive, victims)), 5, "the processes to end")


def test_a_job_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    job = Job(_tiny(free_port()), tmp_path, ("sh", "-c", "echo out of luck; exit 3"))
    try:
        assert job.wait(120) == [3, 3]
        with pytest.raises(JobError, match="code 3\nout of luck"):
            job.check()
    finally:
        job.kill()


def test_borrowed_sockets_are_those_of_the_other_process() -> None:
    program = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(bytes(1000)); print("sent", flush=True); sys.stdin.read()
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "sent\n"
        accepted, _ = server.accept()
        try:
            assert sockets.connections(child.pid, [port]) == []
            [borrowed] = sockets.connections(child.pid)
            with borrowed:
                assert borrowed.getpeername()[1] == port
                until(lambda: sockets.bytes_acked(borrowed) >= 1000, 5, "the bytes")
                # The kernel counts the SYN as a byte.
                assert sockets.bytes_acked(borrowed) in (1000, 1001)
                borrowed.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0xC0)
                assert sockets.dscp(borrowed) == 48
        finally:
            child.communicate("", timeout=120)
            accepted.close()


def _mark(job: Job, tos: int) -> None:
    for pid in job.workers():
        for connection in sockets.connections(pid, (job.spec.master_port,)):
            with connection:
                connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


@pytest.mark.full
@pytest.mark.skipif(not _OK, reason=_REASON)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_priority_that_crux_would_give_takes_the_harm_away(tmp_path: Path) -> None:
    """The effect that the demo shows, with the classes set by hand."""
    with ExitStack() as stack:
        fabric = stack.enter_context(Fabric(FabricSpec(hosts_per_leaf=1)))
        hosts = [fabric.host(0, 0), fabric.host(1, 0)]

        def launch(name: str, port: int, ms: int) -> Job:
            flags = ("--steps", "100000", "--accelerator-ms", str(ms))
            spec = JobSpec(name, name, flags, port)
            return stack.enter_context(_running(Job(spec, tmp_path, TORCHRUN, fabric, hosts)))

        gpt = launch("gpt", 29501, 150)
        gpt.pause()
        jobs = {"gpt": gpt, "mlp": launch("mlp", 29502, 100)}

        def median(case: str, running: Sequence[str], tos: int) -> float:
            _mark(gpt, tos)
            window = measure(Phase(case, tuple(running)), jobs, 10, 60)
            return statistics.median(durations(gpt.steps(), [window]))

        alone = median("alone", ["gpt"], 0)
        together = median("together", ["gpt", "mlp"], 0)
        first = median("first", ["gpt", "mlp"], 0xC0)
        assert together > 1.1 * alone
        assert first < together
        assert (first - alone) < 0.5 * (together - alone)
