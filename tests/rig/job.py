"""A job of the suite: ranks in processes of their own, started, bounded and read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lab import nccl_ranks
from rig.kind import ROOT, TESTS, Kind
from rig.outcome import DIED, Outcome, from_json, to_json
from rig.part import load

#: How a job gets its backend: stock; Crux in the stock one's place; Crux by its own name.
STOCK, ATTACHED, CRUX = "stock", "attached", "crux"
#: Exit code of a rank that a part has left in a state unfit for the next one.
SPOILT = 70
#: Times that a job is started for the parts that are left; what is left after that has failed.
STARTS = 5
#: Seconds that ranks have to start, beside what their parts may take.
START_S = 300.0
#: Seconds that the ranks have left once one of them has ended.
GRACE_S = 60.0


def at_once() -> int:
    """Jobs to run side by side where nothing is timed."""
    return max(2, min(6, (os.cpu_count() or 2) // 3))


@dataclass(frozen=True)
class JobFile:
    """What every rank of a job is told.

    Attributes:
        limit_s: that one part may take.
        timeout_s: of the default process group.
        arguments: for the parts.
    """

    kind: str
    mode: str
    size: int
    folder: str
    parts: list[str]
    eager: bool = False
    limit_s: float = 120.0
    timeout_s: float = 120.0
    arguments: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> JobFile:
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def keep(self, part: str, rank: int, outcome: Outcome) -> None:
        """Write an outcome, whole or not at all: the process may be ended at any moment."""
        path = self._path(part, rank)
        draft = path.with_suffix(".new")
        draft.write_bytes(to_json(outcome))
        draft.replace(path)

    def kept(self, part: str, rank: int) -> Outcome | None:
        try:
            return from_json(self._path(part, rank).read_bytes())
        except FileNotFoundError:
            return None

    def _path(self, part: str, rank: int) -> Path:
        return Path(self.folder, f"{part}.{rank}.json")


Outcomes = dict[str, list[Outcome]]


@dataclass(frozen=True)
class Job:
    """A world of ranks that do ``parts``; what is not told here is in :class:`JobFile`.

    Attributes:
        env: variables for all ranks.
        budget_s: that all parts together may take, starting anew included.
    """

    kind: Kind
    mode: str
    size: int
    parts: tuple[str, ...]
    eager: bool = False
    limit_s: float = 120.0
    timeout_s: float = 120.0
    arguments: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    budget_s: float = 600.0

    def environment(self, rank: int) -> dict[str, str]:
        """What this job sets in the environment of a rank."""
        found = {
            "CRUX_STORE": "none",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "support", ROOT))),
        }
        if self.kind.device_type == "cuda":
            # Two runs are compared bit by bit: what is generated must not be what was fastest.
            found |= {"TORCHINDUCTOR_DETERMINISTIC": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            if self.size > 1:
                found |= nccl_ranks.environment(f"suite-{self.mode}", rank, "lo")
        found |= self.env
        return found | self.kind.environment({**os.environ, **found}, self.size)

    def run(self, folder: Path) -> Outcomes:
        """Do all parts, starting anew after one that failed; what each rank got, by part."""
        found: Outcomes = {}
        deadline = time.monotonic() + self.budget_s
        for start in range(STARTS):
            left = tuple(name for name in self.parts if name not in found)
            if not left or time.monotonic() > deadline:
                break
            found |= replace(self, parts=left)._once(folder / str(start), deadline)
        untried = [Outcome(DIED, "not tried: no time was left after others failed")] * self.size
        return dict.fromkeys(self.parts, untried) | found

    def _once(self, folder: Path, deadline: float) -> Outcomes:
        """Do parts up to the first that failed on a rank, that one included."""
        folder.mkdir(parents=True)
        file = JobFile(
            kind=self.kind.name,
            mode=self.mode,
            size=self.size,
            folder=str(folder),
            parts=list(self.parts),
            eager=self.eager,
            limit_s=self.limit_s,
            timeout_s=self.timeout_s,
            arguments=self.arguments,
        )
        path = folder / "job.json"
        path.write_bytes(msgspec.json.encode(file))
        codes = self._processes(path, folder, deadline)
        known = load()
        found: Outcomes = {}
        for name in self.parts:
            kept = [file.kept(name, rank) for rank in range(self.size)]
            found[name] = [
                one or Outcome(DIED, self._said(folder, rank, codes[rank]))
                for rank, one in enumerate(kept)
            ]
            if any(one is None or known[name].spoilt_by(one, self.kind.name) for one in kept):
                return found
        # All parts are done: a crash in taking the groups down is the last one's.
        if any(codes):
            found[self.parts[-1]] = [
                Outcome(DIED, self._said(folder, rank, code)) for rank, code in enumerate(codes)
            ]
        return found

    def _processes(self, path: Path, folder: Path, deadline: float) -> list[int]:
        processes = []
        for rank in range(self.size):
            with (folder / f"rank{rank}.err").open("wb") as errors:
                command = [sys.executable, "-m", "rig.worker", str(path), str(rank)]
                env = {**os.environ, **self.environment(rank)}
                processes.append(
                    subprocess.Popen(command, stdout=errors, stderr=errors, env=env, cwd=ROOT)
                )
        try:
            known = load()
            limits = [max(self.limit_s, known[name].limit_s) for name in self.parts]
            longest = START_S + sum(limits) + self.limit_s
            deadline = min(deadline, time.monotonic() + longest)
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if None not in codes:
                    break
                if any(code is not None for code in codes):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
        return [process.wait() for process in processes]

    def _said(self, folder: Path, rank: int, code: int) -> str:
        text = (folder / f"rank{rank}.err").read_text(errors="replace")
        return f"rank {rank} of {self.mode} ended with code {code}: {text[-3000:]}"
