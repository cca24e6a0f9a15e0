"""The simulator's file format: links, jobs and a horizon in one JSON file; its cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from crux_torch.errors import CruxError
from crux_torch.files import read_file
from crux_torch.schedule.model import Burst, Cluster, Flow, Job

#: A file of 100,000 jobs has a tenth of it.
MAX_FILE_BYTES = 1 << 28


class ScenarioError(CruxError, ValueError):
    """A scenario that can't be simulated: the line or key, what is wrong, what was expected."""


Positive = Annotated[float, Meta(gt=0.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
#: Beyond these, a sum of weights loses the small ones.
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
Level = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
#: Bytes on each link.
Traffic = Mapping[str, float]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the file."""


class ScenarioLink(_Record, frozen=True):
    """A link of the network; the start of a transfer takes ``delay_s`` over it."""

    capacity_Bps: Positive
    delay_s: NonNegative = 0.0


class TrafficBurst(_Record, frozen=True, omit_defaults=True):
    """Bytes on each link that are sent from the share ``at`` of an iteration's compute on.

    A list has them of each part, such as a ring, that moves on its own; the burst ends with the
    last. They take ``least_s`` seconds at least, however fast the links are.
    """

    at: Share
    traffic: dict[str, float] | Annotated[list[dict[str, float]], Meta(min_length=1)]
    least_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0

    @property
    def parts(self) -> list[dict[str, float]]:
        """Bytes on each link of each part."""
        return self.traffic if isinstance(self.traffic, list) else [self.traffic]

    @property
    def moves(self) -> bool:
        """True if any part moves anything."""
        return any(moved > 0.0 for part in self.parts for moved in part.values())


class ScenarioJob(_Record, frozen=True, kw_only=True):
    """A job; ``docs/research/simulator.md`` describes its keys."""

    gpus: Positive
    compute_s: NonNegative
    flops: NonNegative = 0.0
    comm_start: Share | None = None
    traffic: dict[str, float] | None = None
    bursts: list[TrafficBurst] | None = None
    paths: dict[str, dict[str, float]] | None = None
    path: str | None = None
    level: Level = 0
    weight: Weight = 1.0
    start_s: NonNegative = 0.0
    iterations: Count | None = None

    @property
    def sent(self) -> tuple[TrafficBurst, ...]:
        """Bursts of an iteration on the path in use."""
        if self.bursts is not None:
            return tuple(self.bursts)
        traffic = self.traffic if self.path is None else (self.paths or {})[self.path]
        start = 1.0 if self.comm_start is None else self.comm_start
        return (TrafficBurst(at=start, traffic=traffic),) if traffic else ()


class _File(_Record, frozen=True):
    links: dict[str, Any]
    jobs: dict[str, Any]
    horizon_s: Positive
    slack_bytes: Positive | None = None


class Scenario(_Record, frozen=True):
    """A scenario: built by :func:`parse_scenario`, or by hand."""

    links: dict[str, ScenarioLink]
    jobs: dict[str, ScenarioJob]
    horizon_s: float
    slack_bytes: float | None = None


_Kind = TypeVar("_Kind", bound=_Record)


def read_scenario(path: str | Path) -> Scenario:
    """Reads a scenario file.

    Raises:
        ScenarioError: the file can't be read or simulated; the message begins with its name.
    """
    try:
        return parse_scenario(read_file(path, MAX_FILE_BYTES).decode())
    except OSError as error:
        raise ScenarioError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: can't be read: {error}") from None
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def parse_scenario(text: str) -> Scenario:
    """Reads a scenario from JSON text.

    Raises:
        ScenarioError: names the line or the key, what is wrong and what was expected.
    """
    file = _convert("", _load_json(text), _File)
    # One by one, since msgspec does not name the key of an object's entry.
    links = {n: _convert(f"links.{n}", value, ScenarioLink) for n, value in file.links.items()}
    jobs = {n: _convert(f"jobs.{n}", value, ScenarioJob) for n, value in file.jobs.items()}
    for name, job in jobs.items():
        _check(f"jobs.{name}", job, links)
    if file.slack_bytes is not None and any(link.delay_s for link in links.values()):
        raise ScenarioError("slack_bytes: expected links without delay_s beside it")
    return Scenario(links=links, jobs=jobs, horizon_s=file.horizon_s, slack_bytes=file.slack_bytes)


def _load_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise ScenarioError(f"key {key!r} appears twice in one object, expected it once")
            members[key] = value
        return members

    def number(literal: str) -> float:
        value = float(literal)
        if math.isinf(value):
            raise ScenarioError(f"{literal} is too large, expected a finite number")
        return value

    def constant(name: str) -> NoReturn:
        raise ScenarioError(f"{name} is not a number of JSON, expected a finite number")

    try:
        return json.loads(
            text, object_pairs_hook=unique, parse_float=number, parse_constant=constant
        )
    except json.JSONDecodeError as error:
        raise ScenarioError(
            f"line {error.lineno}, column {error.colno}: {error.msg}, expected JSON"
        ) from None
    except ScenarioError:
        raise
    except (RecursionError, ValueError) as error:
        raise ScenarioError(f"expected JSON that can be read: {error}") from None


def _convert(where: str, value: Any, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = (where + at.rstrip("`")).lstrip(".")
        found = value.get(at.strip(".`")) if isinstance(value, dict) else None
        got = f"got {found}, " if isinstance(found, int | float) else ""
        raise ScenarioError(f"{key}: {got}{message}" if key else message) from None
    except OverflowError:
        raise ScenarioError(f"{where or 'horizon_s'}: a number is too large") from None


def _check(where: str, job: ScenarioJob, links: Mapping[str, ScenarioLink]) -> None:
    """Checks that the types do not make."""
    for name, traffic in (job.paths or {}).items():
        _check_traffic(f"{where}.paths.{name}", traffic, links)
    if job.bursts is not None:
        for key in ("comm_start", "traffic", "paths", "path"):
            if getattr(job, key) is not None:
                raise ScenarioError(f"{where}: has bursts and {key}, expected one of them")
        last = 0.0
        for i, burst in enumerate(job.bursts):
            at = f"{where}.bursts[{i}]"
            if burst.at < last:
                raise ScenarioError(
                    f"{at}.at: got {burst.at}, expected no less than the one before"
                )
            last = burst.at
            for k, part in enumerate(burst.parts):
                of_part = f"[{k}]" if part is not burst.traffic else ""
                _check_traffic(f"{at}.traffic{of_part}", part, links)
            if burst.least_s and not burst.moves:
                raise ScenarioError(
                    f"{at}.least_s: got {burst.least_s}, expected 0 where the burst moves nothing"
                )
    elif job.path is not None and job.path not in (job.paths or {}):
        known = ", ".join(sorted(job.paths or {})) or "none are given"
        raise ScenarioError(f"{where}.path: no path {job.path!r}, expected one of: {known}")
    elif job.path is None and job.paths and job.traffic is None:
        raise ScenarioError(f"{where}: has paths, expected `path` to name the one in use")
    _check_traffic(f"{where}.traffic", job.traffic or {}, links)
    if job.compute_s == 0.0 and not any(burst.moves for burst in job.sent):
        raise ScenarioError(
            f"{where}: an iteration takes no time, expected compute_s above 0 or some traffic"
        )


def _check_traffic(where: str, traffic: Traffic, links: Mapping[str, ScenarioLink]) -> None:
    for link, amount in traffic.items():
        if link not in links:
            raise ScenarioError(f"{where}: no link {link!r}, expected one that `links` defines")
        if not amount >= 0.0:
            raise ScenarioError(f"{where}.{link}: got {amount}, expected 0 or more")


def cluster_of(scenario: Scenario) -> tuple[Cluster, dict[str, tuple[int, ...]]]:
    """The scenario's jobs and links, and the paths in use as ``SchedulerOptions.default_path``.

    A job without alternatives gets one flow for each link of each part, so that its bytes may
    differ from link to link. A job with alternatives gets one flow that takes one of them, which
    needs the same bytes on every link of every alternative.

    Raises:
        ScenarioError: what a cluster can't hold: delays, jobs that end, bursts that spread over
            links differently, alternatives of unequal bytes.
    """
    for name, link in scenario.links.items():
        if link.delay_s:
            raise ScenarioError(f"links.{name}.delay_s: schedulers know no delays, expected 0")
    jobs, default = [], {}
    for name, job in scenario.jobs.items():
        if job.iterations is not None:
            raise ScenarioError(f"jobs.{name}.iterations: expected jobs that run to the horizon")
        flows, parts, chosen = _flows(name, job)
        default[name] = chosen
        jobs.append(
            Job(
                name=name,
                gpus=job.gpus,  # type: ignore[arg-type]
                flops=job.flops,
                compute_s=job.compute_s,
                flows=flows,
                bursts=_bursts(name, job),
                parts=parts if len(set(parts)) > 1 else (),
            )
        )
    capacity_Bps = {name: link.capacity_Bps for name, link in scenario.links.items()}
    return Cluster(capacity_Bps, tuple(jobs)), default


def _flows(
    name: str, job: ScenarioJob
) -> tuple[tuple[Flow, ...], tuple[int, ...], tuple[int, ...]]:
    """The flows, the part of each, and the candidate that each takes."""
    if not job.paths or len(job.paths) < 2:
        sent = {key: moved for key, moved in _sum_of_bursts(job).items() if moved > 0}
        flows = tuple(Flow(moved, ((link,),)) for (_, link), moved in sent.items())
        return flows, tuple(part for part, _ in sent), (0,) * len(flows)
    sizes = {moved for traffic in job.paths.values() for moved in traffic.values()}
    if len(sizes) > 1 or job.path is None:
        raise ScenarioError(
            f"jobs.{name}.paths: expected the same bytes on every link of every alternative, and "
            "`path` to name the one in use"
        )
    flow = Flow(max(sizes, default=0.0), tuple(tuple(traffic) for traffic in job.paths.values()))
    return (flow,), (0,), (list(job.paths).index(job.path),)


def _sum_of_bursts(job: ScenarioJob) -> dict[tuple[int, str], float]:
    """Bytes of an iteration of each part on each link."""
    total: dict[tuple[int, str], float] = {}
    for burst in job.sent:
        for number, part in enumerate(burst.parts):
            for link, moved in part.items():
                total[number, link] = total.get((number, link), 0.0) + moved
    return total


def _bursts(name: str, job: ScenarioJob) -> tuple[Burst, ...]:
    sums = _sum_of_bursts(job)
    total = sum(sums.values())
    if total <= 0:
        return (Burst(1.0, 1.0),)
    bursts = []
    for burst in job.sent:
        share = sum(sum(part.values()) for part in burst.parts) / total
        for (number, link), whole in sums.items():
            part = burst.parts[number] if number < len(burst.parts) else {}
            if abs(part.get(link, 0.0) - share * whole) > 1e-9 * whole:
                raise ScenarioError(
                    f"jobs.{name}.bursts: expected each burst to carry the same share of every "
                    f"link's bytes; link {link!r} differs"
                )
        bursts.append(Burst(burst.at, share, burst.least_s))
    return tuple(bursts)
