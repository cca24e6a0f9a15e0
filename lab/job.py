"""One training job of the lab: its ranks on their hosts, started, steered and read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import nccl_ranks
from lab.fabric import Fabric, Host
from lab.sockets import descendants

ROOT = Path(__file__).parents[1]
PROGRAM = "lab.train"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
#: Where a rank runs without a fabric.
LOOPBACK = Host(0, 0, "", "127.0.0.1", "lo")


class JobError(RuntimeError):
    """A job ended, or did not get ready: with the end of what it printed."""


@dataclass(frozen=True)
class JobSpec:
    """A model of lab.train and its flags; one rank runs on each host.

    ``program`` is the module that trains: lab.train, or one that does something before.

    With ``device`` ``cuda`` all ranks of all jobs share the first GPU.
    """

    name: str
    model: str
    arguments: tuple[str, ...]
    master_port: int
    device: str = "cpu"
    program: str = PROGRAM

    def environment(self, rank: int, interface: str) -> dict[str, str]:
        """What a rank's process needs besides the launcher's environment."""
        found = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": interface}
        found["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        )
        if self.device == "cuda":
            found |= nccl_ranks.environment(self.name, rank, interface)
            # Two runs are compared bit by bit: cuBLAS must not choose by what else is running.
            found |= {"CUDA_VISIBLE_DEVICES": _first_gpu(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            # They stand for hosts of their own, which share no PCIe link.
            found["CRUX_LINKS"] = "none"
        return found


@dataclass(frozen=True)
class Step:
    """One training step of rank 0; times of the monotonic clock, the loss as ``float.hex``."""

    step: int
    start: float
    computed: float
    end: float
    loss: str

    @property
    def duration_s(self) -> float:
        return self.end - self.start


class Job:
    """A running job. Without a fabric its two ranks share this machine's loopback.

    Args:
        launcher: the command before torchrun's flags.
        environment: added to this process's environment.
    """

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        launcher: Sequence[str],
        fabric: Fabric | None = None,
        hosts: Sequence[Host] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self._folder = folder
        self._log = folder / f"{spec.name}.jsonl"
        self._control = folder / f"{spec.name}.control.json"
        self._steps: list[Step] = []
        self._log_offset = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        self._write_control(paused=False)
        self._agents: list[subprocess.Popen[Any]] = []
        for rank, host in enumerate(hosts if fabric else (LOOPBACK, LOOPBACK)):
            env = {**os.environ, **spec.environment(rank, host.interface), **(environment or {})}
            place = ["--nnodes", str(len(hosts) if fabric else 2), "--node-rank", str(rank)]
            place += ["--nproc-per-node", "1", "--master-addr"]
            place.append(hosts[0].address if fabric else host.address)
            command = self._command(launcher, place)
            with self._output(rank).open("wb") as output:
                options = {"env": env, "stdout": output, "stderr": subprocess.STDOUT}
                if fabric:
                    # Namespaces of one machine share its host name; real hosts have their own.
                    env["CRUX_HOST"] = host.name
                    self._agents.append(fabric.popen(host, command, **options))
                else:
                    self._agents.append(
                        subprocess.Popen(command, start_new_session=True, **options)
                    )

    @property
    def name(self) -> str:
        return self.spec.name

    def pause(self) -> None:
        """Let the job wait after its current step."""
        self._write_control(paused=True)

    def resume(self) -> None:
        self._write_control(paused=False)

    def steps(self) -> list[Step]:
        """The steps that rank 0 has finished so far."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_offset)
                text = log.read()
        except FileNotFoundError:
            return self._steps
        complete = text[: text.rfind(b"\n") + 1]
        self._log_offset += len(complete)
        self._steps += [Step(**json.loads(line)) for line in complete.splitlines()]
        return self._steps

    def check(self) -> None:
        """Raises:
        JobError: one of the job's launchers has ended.
        """
        for rank, agent in enumerate(self._agents):
            if agent.poll() is not None:
                raise JobError(f"{self.name} ended with code {agent.returncode}\n{self.tail(rank)}")

    def tail(self, rank: int = 0, lines: int = 40) -> str:
        """The last lines that a rank's launcher and the rank itself printed."""
        text = self._output(rank).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def workers(self) -> list[int]:
        """Process ids of the training processes, by rank."""
        found = []
        for agent in self._agents:
            for pid in descendants(agent.pid):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if self.spec.program.encode() in command:
                    found.append(pid)
        return found

    def processes(self) -> list[int]:
        """The launchers that still run and everything below them."""
        running = [agent.pid for agent in self._agents if agent.poll() is None]
        return [pid for root in running for pid in (root, *descendants(root))]

    def finish(self) -> None:
        """Let the job end by itself, a few steps ahead."""
        self._write_control(paused=False, last_step=len(self.steps()) + 5)

    def wait(self, timeout_s: float) -> list[int | None]:
        """Its launchers' exit codes once they have ended, None for one that has not in time."""
        deadline = time.monotonic() + timeout_s
        codes: list[int | None] = []
        for agent in self._agents:
            try:
                codes.append(agent.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def kill(self, grace_s: float = 5.0) -> None:
        """End whatever of the job still runs."""
        # Descriptors, because a number may belong to another process by the time it is used.
        below = [fd for pid in self.processes() if (fd := _pidfd(pid)) is not None]
        for agent in self._agents:
            agent.terminate()
        self.wait(grace_s)
        for agent in self._agents:
            agent.kill()
            agent.wait()
        # Launchers end their workers; these are the ones of a launcher that could not.
        for fd in below:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)

    def _command(self, launcher: Sequence[str], place: list[str]) -> list[str]:
        return [
            *launcher,
            *place,
            "--master-port",
            str(self.spec.master_port),
            *("--module", self.spec.program, self.spec.model),
            *("--device", self.spec.device),
            *self.spec.arguments,
            "--log-file",
            str(self._log),
            "--control",
            str(self._control),
        ]

    def _output(self, rank: int) -> Path:
        return self._folder / f"{self.spec.name}.rank{rank}.out"

    def _write_control(self, paused: bool, last_step: int | None = None) -> None:
        # Renamed into place, so that a rank never reads half a file.
        draft = self._control.with_suffix(".new")
        draft.write_text(json.dumps({"paused": paused, "last_step": last_step}))
        draft.replace(self._control)


def _first_gpu() -> str:
    """The first GPU that this process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
