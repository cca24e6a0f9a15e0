"""A real job of two ranks on loopback, as tests start, watch and end it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_fakes import until
from places import ROOT, SUPPORT

from crux_torch.agreement.records import Plan

SCRIPT = str(SUPPORT.joinpath("kill_job.py"))
BOUND_S = 300
SEED = 3
#: c10d's word, which only a log level for the whole process could silence.
C10D_TRACE = re.compile(
    r"^.*TCPStore\.cpp:\d+\] \[c10d\] (recv|send)\w* failed on SocketImpl.*\n"
    r"(Exception raised from .*\n|frame #.*\n|<omitting python frames>\n|\n)*",
    re.MULTILINE,
)
#: What a job starts with, its measurements and plans, and its summary.
NEWS = re.compile(
    r"^[-\d]+ [:\d]+ \[crux(run)? \S+\] INFO "
    r"(job|first plan|plan \d+|measured|summary)\b.*\n(    .*\n)*",
    re.MULTILINE,
)


def less_news(said: str) -> str:
    """What a job wrote to stderr, less the lines that every job writes."""
    return NEWS.sub("", said)


def environment(path: Sequence[Path] = ()) -> dict[str, str]:
    """This process's environment without what Crux is told in it.

    Args:
        path: folders that Python looks in first.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "PET_"))}
    folders = [*map(str, path), str(ROOT), str(ROOT / "launcher"), inherited.get("PYTHONPATH", "")]
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return {**inherited, "OMP_NUM_THREADS": "1", "CRUX_TUNING": "start_s=0.1"}


@dataclass(eq=False)
class JobFolder:
    """What the two ranks of a job ``name`` write into ``folder``."""

    name: str
    folder: Path

    def status(self, rank: int = 0) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            read: dict[str, Any] = json.loads((self.folder / f"{rank}.status").read_text())
            return read
        return {}

    def leader(self) -> dict[str, Any]:
        return self.status().get("leader") or {}

    def follows(self, plan: Plan) -> bool:
        """Whether the sockets of both ranks carry this plan's class."""
        entry = plan.entry(self.name)
        for rank in (0, 1):
            status = self.status(rank)
            order, applied = status.get("order"), status.get("applied")
            if entry is None or not order or order["measuring"] or not applied["marked"]:
                return False
            if (order["plan_epoch"], applied["level"]) != (plan.epoch, entry.level):
                return False
        return True

    def losses(self) -> list[str]:
        return (self.folder / "losses").read_text().splitlines()

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return len(self.losses())
        return 0


class Job(JobFolder):
    """One launcher with its two workers.

    Args:
        launcher: module that is run, ``cruxrun`` or ``torch.distributed.run``.
        folder: where the workers write, made where it is absent; its name is the job's.
        arguments: of ``kill_job.py``.
        under: a command that starts the launcher, with its arguments.
        path: folders that Python looks in first.
        env: variables on top of this process's, less its own of Crux.
    """

    def __init__(
        self,
        launcher: str,
        folder: Path,
        *arguments: str,
        under: Sequence[str] = (),
        path: Sequence[Path] = (),
        **env: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder.name, folder)
        options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
        command = [sys.executable, "-m", launcher, *options, SCRIPT, str(folder)]
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.launcher = subprocess.Popen(
                [*under, *command, f"--seed={SEED}", *arguments],
                env={**environment(path), **env},
                # ``-m`` looks for modules in the working directory first.
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def said(self) -> list[str]:
        """Its stderr, less the news, and the trace that c10d prints where a store dies amid one of
        its calls."""
        return less_news(C10D_TRACE.sub("", self.errors.read_text())).splitlines()

    def end(self, after_its_steps: bool = False) -> None:
        """Let it end by itself: soon, or after its last step."""
        if not after_its_steps:
            (self.folder / "stop").touch()
        assert self.launcher.wait(BOUND_S) == 0, self.errors.read_text()

    def kill_everything(self) -> None:
        """SIGKILL to the launcher and its workers, which have sessions of their own."""
        pids = self.worker_pids() + [self.launcher.pid] * (self.launcher.poll() is None)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait(BOUND_S)
        until(lambda: not any(map(alive, pids)), BOUND_S, "the processes to end")

    def worker_pids(self) -> list[int]:
        pids = []
        for rank in (0, 1):
            with contextlib.suppress(FileNotFoundError):
                pid = self.pid(rank)
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if str(self.folder).encode() in command:
                        pids.append(pid)
        return pids


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
