"""Traces of arriving jobs: the hybrid trace, the published dataset, one's own CSV, a generator."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from crux_torch.files import read_file
from crux_torch.sim.catalogue import MODELS, WorkloadError

DAY_S = 86400.0
MAX_FILE_BYTES = 1 << 30
OWN_COLUMNS = ("name", "model", "gpus", "submit_s", "duration_s")
PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus")
SIZE_COLUMNS = ("model", "total_gpu")
JOB_COLUMNS = ("job_name", "model", "gmt_job_submitted", "gmt_job_finished")
WORKER_COLUMNS = ("job_name", "gmt_pod_running", "RES")
#: Begins the 14 days in which the most multi-GPU jobs were submitted.
HYBRID_START = datetime(2017, 11, 1)
LINGJUN_TIME = "%Y/%m/%d %H:%M"
GPU_RESOURCE = "nvidia.com/gpu"
#: Catalogue entries for the names that the published list of jobs uses, lower case. Those of
#: unknown kind train the nearest stand-in: a 256-GPU language model, and embeddings.
MODEL_OF_NAME: Mapping[str, str] = {
    **{name: name for name in ("gpt", "gpt-3b", "gpt-7b", "gpt-13b", "resnet", "bert", "nmt")},
    "llama": "llama-7b",
    "llama_30b": "llama-30b",
    "65b": "llama-65b",
    "66b": "llama-65b",
    "130b-infer": "llama-65b",
    "mnist": "resnet",
    "dlm": "transformer-nlp",
    "word_embedding": "ctr",
    "ctr": "ctr",
}
DEFAULT_MODEL = "bert"


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace; its model is a name of the catalogue.

    ``duration_s`` is how long it ran, or would run undisturbed.
    """

    name: str
    model: str
    gpus: int
    submit_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order of their arrival, and the rows that were left out, counted by reason.

    ``kind`` says what it is: ``hybrid`` and ``generated`` are not the paper's trace.
    """

    kind: str
    jobs: tuple[TraceJob, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)


def catalogue_name(name: str) -> str:
    """The catalogue's entry for a model's name in a trace; ``bert`` for one that is not known."""
    if name in MODELS:
        return name
    return MODEL_OF_NAME.get(name.lower(), DEFAULT_MODEL)


def load_hybrid(
    arrivals: str | os.PathLike[str],
    sizes: str | os.PathLike[str],
    *,
    days: int = 14,
    jobs: int | None = None,
    seed: int = 0,
) -> Trace:
    """Arrivals and durations of the Philly trace with models and sizes of the Crux dataset.

    It is not the paper's trace: compare orderings and gaps with the paper, never its figures.

    Args:
        arrivals: CSV (or .csv.gz) with ``timestamp,duration,num_gpus``.
        sizes: CSV with ``model,total_gpu``; rows of no GPU are left out.
        days: length of the window, which begins at ``HYBRID_START``.
        jobs: the number of arrivals to keep, drawn at random; None: all of the window.

    Raises:
        WorkloadError: the file and line, what is wrong, and what was expected.
    """
    window = []
    dropped: Counter[str] = Counter()
    for where, row in _rows(arrivals, PHILLY_COLUMNS):
        at = _when(where, "timestamp", row["timestamp"], None) - HYBRID_START
        duration_s = _number(where, "duration", row["duration"])
        if not timedelta(0) <= at < timedelta(days=days):
            dropped["outside the window"] += 1
        elif duration_s <= 0:
            dropped["no duration"] += 1
        else:
            window.append((at.total_seconds(), duration_s))
    kinds = []
    for where, row in _rows(sizes, SIZE_COLUMNS):
        gpus = int(_number(where, "total_gpu", row["total_gpu"]))
        if gpus < 1:
            dropped["no GPU"] += 1
        else:
            kinds.append((catalogue_name(row["model"]), gpus))
    if not window or not kinds:
        raise WorkloadError(
            f"{arrivals}, {sizes}: nothing left in {days} days from {HYBRID_START:%Y-%m-%d}"
        )
    rng = random.Random(seed)
    if jobs is not None and jobs < len(window):
        dropped["not drawn"] += len(window) - jobs
        window = rng.sample(window, jobs)
    window.sort()
    made = (
        TraceJob(f"job{i}", *rng.choice(kinds), at, duration)
        for i, (at, duration) in enumerate(window)
    )
    return Trace("hybrid", tuple(made), dict(dropped))


def load_lingjun(jobs: str | os.PathLike[str], workers: str | os.PathLike[str]) -> Trace:
    """The dataset that the paper published (alibaba-lingjun-dataset-2023).

    A job starts when its first worker does and ends at its own end; one that still ran when the
    recording ended is cut there. Its size is the sum of its workers' GPUs.

    Raises:
        WorkloadError: the file and line, what is wrong, and what was expected.
    """
    gpus_of: Counter[str] = Counter()
    started: dict[str, datetime] = {}
    last = datetime.min
    for where, row in _rows(workers, WORKER_COLUMNS):
        job = row["job_name"]
        gpus_of[job] += _worker_gpus(where, row["RES"])
        if row["gmt_pod_running"]:
            at = _when(where, "gmt_pod_running", row["gmt_pod_running"], LINGJUN_TIME)
            started[job] = min(started.get(job, at), at)
            last = max(last, at)

    rows = []
    for where, row in _rows(jobs, JOB_COLUMNS):
        submitted = _when(where, "gmt_job_submitted", row["gmt_job_submitted"], LINGJUN_TIME)
        finished = None
        if row["gmt_job_finished"]:
            finished = _when(where, "gmt_job_finished", row["gmt_job_finished"], LINGJUN_TIME)
        last = max(last, submitted, finished or submitted)
        rows.append((row["job_name"], row["model"], submitted, finished))

    dropped: Counter[str] = Counter()
    kept: list[tuple[datetime, TraceJob]] = []
    for name, model, submitted, finished in rows:
        begin, end = started.get(name), finished or last
        if begin is None:
            dropped["never ran"] += 1
        elif not gpus_of[name]:
            dropped["no GPU"] += 1
        elif end <= begin or begin < submitted:
            dropped["impossible times"] += 1
        else:
            ran_s = (end - begin).total_seconds()
            kept.append(
                (submitted, TraceJob(name, catalogue_name(model), gpus_of[name], 0.0, ran_s))
            )
    if not kept:
        raise WorkloadError(f"{jobs}: no job ran; expected workers of its jobs in {workers}")
    kept.sort(key=lambda pair: (pair[0], pair[1].name))
    origin = kept[0][0]
    timed = (replace(job, submit_s=(at - origin).total_seconds()) for at, job in kept)
    return Trace("lingjun", tuple(timed), dict(dropped))


def load_csv(path: str | os.PathLike[str]) -> Trace:
    """One's own trace: ``name,model,gpus,submit_s,duration_s``.

    Raises:
        WorkloadError: the line, what is wrong, and what was expected.
    """
    jobs = []
    names: set[str] = set()
    for where, row in _rows(path, OWN_COLUMNS):
        gpus = _number(where, "gpus", row["gpus"])
        submit_s = _number(where, "submit_s", row["submit_s"])
        duration_s = _number(where, "duration_s", row["duration_s"])
        if gpus < 1 or gpus != int(gpus):
            raise WorkloadError(f"{where}: gpus is {row['gpus']!r}; expected 1 or more")
        if submit_s < 0 or duration_s <= 0:
            raise WorkloadError(f"{where}: expected submit_s of 0 or more, duration_s above 0")
        if row["model"] not in MODELS:
            raise WorkloadError(
                f"{where}: model {row['model']!r}; expected one of {', '.join(MODELS)}"
            )
        if not row["name"] or row["name"] in names:
            raise WorkloadError(f"{where}: name {row['name']!r}; expected a name of its own")
        names.add(row["name"])
        jobs.append(TraceJob(row["name"], row["model"], int(gpus), submit_s, duration_s))
    if not jobs:
        raise WorkloadError(f"{path}: there is no job; expected a line for each")
    return Trace("csv", tuple(sorted(jobs, key=lambda j: (j.submit_s, j.name))))


#: (share, GPUs, models) of generated jobs. The paper's text gives: more than 10% of the jobs, all
#: GPT variants, have 128 GPUs or more, the largest 512 (§2.2, Figure 4). The rest is our choice.
GENERATED_SIZES: tuple[tuple[float, int, tuple[str, ...]], ...] = (
    (0.070, 128, ("gpt", "gpt-7b", "gpt-13b")),
    (0.040, 256, ("gpt", "gpt-7b", "gpt-13b")),
    (0.010, 512, ("gpt", "gpt-7b", "gpt-13b")),
    (0.08, 64, ("gpt", "transformer-nlp", "bert")),
    (0.10, 32, ("gpt", "transformer-nlp", "bert", "ctr")),
    (0.15, 16, ("bert", "bert-128", "nmt", "ctr", "multi-interests-large")),
    (0.30, 8, ("bert", "resnet", "resnet-152", "nmt", "nmt-base", "ctr", "multi-interests")),
    (0.10, 4, ("resnet", "resnet-152", "nmt-base", "multi-interests")),
    (0.15, 1, ("resnet", "nmt-base", "multi-interests")),
)
#: Jobs that run at once on average: with the daily wave, the peak comes out at a little over 30.
MEAN_RUNNING = 16


def generate(seed: int = 0, jobs: int = 5000, days: float = 14.0) -> Trace:
    """A trace with the marginals that the paper describes for its cluster (§2.2, Figures 4, 5).

    5,000 jobs in two weeks, of which more than 30 run at once and hold 1,000 and more GPUs in the
    peak hour. Arrivals are a Poisson process with a daily wave; durations are log-normal, their
    mean such that ``MEAN_RUNNING`` jobs run on average. Figure 6, the share of jobs that meet
    others, is not an input: it follows from placement. The same seed gives the same trace.
    """
    rng = random.Random(seed)
    sigma = 1.5
    mean_s = MEAN_RUNNING * days * DAY_S / jobs
    weights = [share for share, _, _ in GENERATED_SIZES]
    made = []
    for i, at in enumerate(sorted(_arrival(rng, days * DAY_S) for _ in range(jobs))):
        _, gpus, models = rng.choices(GENERATED_SIZES, weights)[0]
        duration_s = rng.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)
        made.append(TraceJob(f"job{i}", rng.choice(models), gpus, at, duration_s))
    return Trace("generated", tuple(made))


def _arrival(rng: random.Random, horizon_s: float) -> float:
    """A time whose density rises and falls by 60% over the day, by rejection."""
    while True:
        at = rng.uniform(0, horizon_s)
        if rng.uniform(0, 1.6) < 1 + 0.6 * math.sin(2 * math.pi * at / DAY_S):
            return at


def _rows(
    path: str | os.PathLike[str], columns: Iterable[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """(place for errors, row) of a CSV that has at least ``columns``."""
    file = Path(path)
    try:
        lines = io.StringIO(read_file(file, MAX_FILE_BYTES, unpack=True).decode(), newline="")
        reader = csv.DictReader(lines)
        missing = [c for c in columns if c not in (reader.fieldnames or ())]
        if missing:
            raise WorkloadError(f"{file}: line 1: the column {missing[0]!r} is missing")
        for row in reader:
            where = f"{file}: line {reader.line_num}"
            if None in row.values() or None in row:
                raise WorkloadError(f"{where}: expected {len(reader.fieldnames or ())} fields")
            yield where, row
    except OSError as error:
        raise WorkloadError(f"{file}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{file}: {error}") from None


def _number(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise WorkloadError(f"{where}: {column} is {text!r}; expected a number")
    return value


def _when(where: str, column: str, text: str, form: str | None) -> datetime:
    try:
        return datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
    except ValueError:
        expected = form or "YYYY-MM-DD HH:MM:SS"
        raise WorkloadError(f"{where}: {column} is {text!r}; expected {expected}") from None


def _worker_gpus(where: str, resources: str) -> int:
    """GPUs in a worker's resources; workers without any have none or an empty field."""
    if not resources:
        return 0
    try:
        return int(json.loads(resources).get(GPU_RESOURCE, 0))
    except (ValueError, TypeError, AttributeError):
        raise WorkloadError(
            f'{where}: RES is {resources!r}; expected JSON such as {{"{GPU_RESOURCE}": "8"}}'
        ) from None


PHILLY, SIZES = "philly.csv.gz", "lingjun_job_sizes.csv"
LINGJUN_FILES = ("job.csv", "worker.csv")


@dataclass(frozen=True, slots=True)
class Workload:
    """The trace that is replayed.

    Attributes:
        kind: ``hybrid``, ``generated``, ``lingjun``, or the path of a CSV of one's own.
        data: folder with the public files, for ``hybrid`` and ``lingjun``.
        jobs: how many arrive; None: as many as there are.
    """

    kind: str
    data: str | None = None
    jobs: int | None = 5000
    days: int = 14
    seed: int = 0

    def load(self) -> Trace:
        """The trace.

        Raises:
            WorkloadError: what is wrong with which file.
        """
        if self.kind == "generated":
            return generate(self.seed, self.jobs or 5000, self.days)
        if self.kind == "hybrid":
            folder = self._folder((PHILLY, SIZES))
            return load_hybrid(
                folder / PHILLY, folder / SIZES, days=self.days, jobs=self.jobs, seed=self.seed
            )
        if self.kind == "lingjun":
            folder = self._folder(LINGJUN_FILES)
            whole = load_lingjun(folder / LINGJUN_FILES[0], folder / LINGJUN_FILES[1])
        else:
            whole = load_csv(self.kind)
        inside = [job for job in whole.jobs if job.submit_s < self.days * DAY_S]
        if not inside:
            raise WorkloadError(f"{self.kind}: no job arrives within --days {self.days}")
        kept = inside[: self.jobs]
        cut = {
            f"after --days {self.days}": len(whole.jobs) - len(inside),
            f"beyond --jobs {self.jobs}": len(inside) - len(kept),
        }
        dropped = {**whole.dropped, **{why: count for why, count in cut.items() if count}}
        return Trace(whole.kind, tuple(kept), dropped)

    def _folder(self, files: Sequence[str]) -> Path:
        folder = Path(self.data or ".")
        for name in files:
            if not (folder / name).exists():
                raise WorkloadError(f"{folder / name} is missing; the {self.kind} trace needs it")
        return folder
