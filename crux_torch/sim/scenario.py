"""The simulator's exchange format: links, jobs and a horizon in one JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from crux_torch.errors import CruxError


class ScenarioError(CruxError, ValueError):
    """A scenario that can't be simulated: the line or key, what is wrong, what was expected."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link of the network.

    Attributes:
        capacity_Bps: bytes per second.
        delay_s: seconds that the start of a transfer takes over it.
    """

    capacity_Bps: float
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrafficBurst:
    """One burst of an iteration's communication.

    Attributes:
        at: share of the iteration's compute that is done when the burst may start, 0 to 1.
        traffic: bytes on each link.
    """

    at: float
    traffic: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScenarioJob:
    """A job, with the traffic of the path in use.

    Attributes:
        gpus: devices that it occupies.
        compute_s: seconds of compute of one iteration.
        bursts: sent in this order in every iteration.
        flops: of one iteration over all its devices.
        level: priority; a higher level goes first.
        weight: share within its level.
        start_s: when its first iteration starts to compute.
        iterations: after which it ends; None: it goes on to the horizon.
        paths: the alternatives that the file gives: bytes on each link.
        path: the alternative in use, if it is one of them.
    """

    gpus: float
    compute_s: float
    bursts: tuple[TrafficBurst, ...] = ()
    flops: float = 0.0
    level: int = 0
    weight: float = 1.0
    start_s: float = 0.0
    iterations: int | None = None
    paths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated: built by :func:`parse_scenario`, or by hand."""

    links: Mapping[str, Link]
    jobs: Mapping[str, ScenarioJob]
    horizon_s: float


class _LinkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_Bps: float
    delay_s: float = 0.0


class _BurstRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: float
    traffic: dict[str, float]


class _JobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpus: float
    compute_s: float
    flops: float = 0.0
    comm_start: float | None = None
    traffic: dict[str, float] | None = None
    bursts: list[_BurstRecord] | None = None
    paths: dict[str, dict[str, float]] | None = None
    path: str | None = None
    level: int = 0
    weight: float = 1.0
    start_s: float = 0.0
    iterations: int | None = None


class _FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    links: dict[str, Any]
    jobs: dict[str, Any]
    horizon_s: float


_Record = TypeVar("_Record")


def read_scenario(path: str | Path) -> Scenario:
    """Reads a scenario file.

    Raises:
        ScenarioError: for a file that can't be read or simulated; it begins with the file's name.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: can't be read: {error}") from None
    try:
        return parse_scenario(text)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def parse_scenario(text: str) -> Scenario:
    """Reads a scenario from JSON text.

    Raises:
        ScenarioError: names the line or the key, what is wrong and what was expected.
    """
    record = _convert("", _load_json(text), _FileRecord)
    _check("horizon_s", record.horizon_s, _positive)
    links = {}
    for name, value in record.links.items():
        link = _convert(f"links.{name}", value, _LinkRecord)
        _check(f"links.{name}.capacity_Bps", link.capacity_Bps, _positive)
        _check(f"links.{name}.delay_s", link.delay_s, _non_negative)
        links[name] = Link(link.capacity_Bps, link.delay_s)
    jobs = {
        name: _job(f"jobs.{name}", _convert(f"jobs.{name}", value, _JobRecord), links)
        for name, value in record.jobs.items()
    }
    return Scenario(links, jobs, record.horizon_s)


def _load_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ScenarioError(f"key {twice!r} appears twice in one object, expected it once")
        return members

    def constant(name: str) -> float:
        raise ScenarioError(f"{name} is not a number of JSON, expected a finite number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ScenarioError(
            f"line {error.lineno}, column {error.colno}: {error.msg}, expected JSON"
        ) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        raise ScenarioError(f"expected JSON that can be read: {error}") from None


def _convert(where: str, value: Any, record: type[_Record]) -> _Record:
    try:
        return msgspec.convert(value, record)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = (where + at.rstrip("`")).lstrip(".")
        raise ScenarioError(f"{key}: {message}" if key else message) from None
    except OverflowError:
        raise ScenarioError(f"{where or 'horizon_s'}: a number is too large") from None


def _job(where: str, record: _JobRecord, links: Mapping[str, Link]) -> ScenarioJob:
    _check(f"{where}.gpus", record.gpus, _positive)
    _check(f"{where}.flops", record.flops, _non_negative)
    _check(f"{where}.compute_s", record.compute_s, _non_negative)
    _check(f"{where}.weight", record.weight, _positive)
    _check(f"{where}.start_s", record.start_s, _non_negative)
    _check(f"{where}.level", record.level, _level)
    if record.iterations is not None:
        _check(f"{where}.iterations", record.iterations, _count)
    for name, traffic in (record.paths or {}).items():
        _check_traffic(f"{where}.paths.{name}", traffic, links)
    bursts = _bursts(where, record, links)
    if record.compute_s == 0.0 and not any(m > 0.0 for b in bursts for m in b.traffic.values()):
        raise ScenarioError(
            f"{where}: an iteration takes no time, expected compute_s above 0 or some traffic"
        )
    return ScenarioJob(
        gpus=record.gpus,
        compute_s=record.compute_s,
        bursts=bursts,
        flops=record.flops,
        level=record.level,
        weight=record.weight,
        start_s=record.start_s,
        iterations=record.iterations,
        paths=record.paths or {},
        path=record.path,
    )


def _bursts(where: str, record: _JobRecord, links: Mapping[str, Link]) -> tuple[TrafficBurst, ...]:
    if record.bursts is not None:
        for key in ("comm_start", "traffic", "paths", "path"):
            if getattr(record, key) is not None:
                raise ScenarioError(f"{where}: has bursts and {key}, expected one of them")
        last = 0.0
        for i, burst in enumerate(record.bursts):
            at = f"{where}.bursts[{i}].at"
            _check(at, burst.at, _share)
            if burst.at < last:
                raise ScenarioError(f"{at}: got {burst.at}, expected no less than the one before")
            last = burst.at
            _check_traffic(f"{where}.bursts[{i}].traffic", burst.traffic, links)
        return tuple(TrafficBurst(b.at, b.traffic) for b in record.bursts)
    start = 1.0 if record.comm_start is None else record.comm_start
    _check(f"{where}.comm_start", start, _share)
    if record.traffic is not None:
        _check_traffic(f"{where}.traffic", record.traffic, links)
    traffic = record.traffic or {}
    if record.path is not None:
        if record.path not in (record.paths or {}):
            known = ", ".join(sorted(record.paths or {})) or "none are given"
            raise ScenarioError(f"{where}.path: no path {record.path!r}, expected one of: {known}")
        traffic = (record.paths or {})[record.path]
    elif record.paths and record.traffic is None:
        raise ScenarioError(f"{where}: has paths, expected `path` to name the one in use")
    return (TrafficBurst(start, traffic),) if traffic else ()


def _check_traffic(where: str, traffic: Mapping[str, float], links: Mapping[str, Link]) -> None:
    for link, amount in traffic.items():
        if link not in links:
            raise ScenarioError(f"{where}: no link {link!r}, expected one that `links` defines")
        _check(f"{where}.{link}", amount, _non_negative)


def _check(where: str, value: float, expected: Callable[[float], str | None]) -> None:
    problem = expected(value)
    if problem is not None:
        raise ScenarioError(f"{where}: got {value}, expected {problem}")


def _positive(value: float) -> str | None:
    return None if 0.0 < value < math.inf else "a finite number above 0"


def _non_negative(value: float) -> str | None:
    return None if 0.0 <= value < math.inf else "a finite number, 0 or more"


def _share(value: float) -> str | None:
    return None if 0.0 <= value <= 1.0 else "a share from 0 to 1"


def _level(value: float) -> str | None:
    return None if -(2**31) <= value < 2**31 else "a whole number of 32 bits"


def _count(value: float) -> str | None:
    return None if 1 <= value < 2**63 else "a whole number, 1 or more"
