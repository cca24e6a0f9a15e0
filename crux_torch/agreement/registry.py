"""Typed access to what a cluster keeps in the store. Bytes that others wrote are validated here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, TypeVar
from urllib.parse import quote, unquote

import msgspec

from crux_torch.agreement import SCHEMA_VERSION
from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.programs import ProgramRecord, programs_prefix
from crux_torch.agreement.records import (
    MAX_JOBS,
    MAX_RECORD_BYTES,
    JobRecord,
    Measured,
    PlanEntry,
    PlanHead,
    RecordError,
    StepTimes,
)
from crux_torch.errors import StoreError
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import Name
from crux_torch.store import APART, AUDIT, MAX_LEASE_S, OPERATOR, PLAN, SharedStore, cluster_prefix

_log = logging.getLogger(__name__)

#: Seconds for which a job whose role may not write something does not try again.
FORBIDDEN_S = 60.0

R = TypeVar("R", bound=msgspec.Struct)


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's head as it lies in the store.

    Attributes:
        renewal: changes with every renewal, so that each reader sees by its own clock when the
            plan was last confirmed.
    """

    renewal: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    plan: PlanHead


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One job's entry of the plans that name it by that digest."""

    version: int = SCHEMA_VERSION
    digest: Name
    entry: PlanEntry


class _Renewed(msgspec.Struct, kw_only=True):
    """A stored plan whose renewal alone is read, so that a newer release's fields stay in it."""

    renewal: int
    plan: msgspec.Raw


class _Versioned(msgspec.Struct):
    """The version of a record, whatever else is in it."""

    version: int | None = None
    plan: _Versioned | None = None


@dataclass(frozen=True, slots=True)
class PlanState:
    """The plan's key as it was read: its bytes, which a swap must expect, and the plan in them.

    ``stored`` is None if there is no plan or none that can be used.
    """

    raw: bytes | None
    stored: StoredPlan | None


@dataclass(frozen=True, slots=True)
class View:
    """The contents of the store at one look.

    Attributes:
        jobs: the live, valid records, in the order of their names.
        topology: as it was published, not validated; None if there is none.
        fragments: what jobs saw of the network, by job, not validated.
        operator: the operator's settings; the defaults if there are none that can be used.
        operator_raw: their bytes, which a swap must expect; None if there are none.
    """

    jobs: tuple[JobRecord, ...]
    topology: bytes | None
    plan: PlanState
    operator: OperatorSettings = field(default_factory=OperatorSettings)
    operator_raw: bytes | None = None
    fragments: Mapping[str, bytes] = field(default_factory=dict)


def decode(kind: type[R], raw: bytes, where: str) -> R:
    """Decode the record in ``raw``, found at ``where``; drop fields that are not known.

    Raises:
        RecordError: it is malformed, too large, or of another version of the schema.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordError(f"{where}: {len(raw)} bytes, limit {MAX_RECORD_BYTES}")
    try:
        versions = msgspec.json.decode(raw, type=_Versioned)
        version = versions.version if versions.plan is None else versions.plan.version
        if version not in (None, SCHEMA_VERSION):
            raise RecordError(
                f"{where}: schema version {version}, expected {SCHEMA_VERSION}: run all jobs of a "
                "cluster with releases of Crux that share a version"
            )
        return msgspec.json.decode(raw, type=kind)
    except RecordError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from None


class Registry:
    """The records of one cluster.

    Every method raises :class:`~crux_torch.errors.StoreError` if the store does. A record that
    can't be used is ignored, with one warning that gives its key and what is wrong with it.
    """

    def __init__(self, store: SharedStore, cluster: str) -> None:
        self.store = store
        self.prefix = cluster_prefix(cluster)
        self.plan_key = self.prefix + PLAN
        #: Where releases kept it whose plans were one value.
        self._older_plan_key = self.prefix + "plan"
        #: Who plans a cluster that is too large for every leader to compute all.
        self.seats_prefix = self.prefix + "seats/"
        #: What lies apart, so that a look does not read it: the entries that they write, what each
        #: job follows, what jobs measure while a plan is tried, what their steps take, and
        #: programs that are no jobs.
        apart = f"{APART}{quote(cluster, safe='')}/"
        self.parts_prefix = apart + "parts/"
        self.follows_prefix = apart + "follows/"
        self.measured_prefix = apart + "measured/"
        self.steps_prefix = apart + "steps/"
        self.programs_prefix = programs_prefix(cluster)
        self.topology_key = self.prefix + "topology"
        self.fragments_prefix = self.prefix + "fragments/"
        self.operator_key = self.prefix + OPERATOR
        self.audit_prefix = f"{AUDIT}{quote(cluster, safe='')}/"
        self._warn = WarnOnce(_log)
        self._found: Mapping[str, bytes] = {}
        self._records: dict[str, tuple[bytes, JobRecord | None]] = {}
        self._view = self._glanced = View((), None, PlanState(None, None))

    def job_key(self, job: str) -> str:
        """Return the key of the record of ``job``, whose name may have any characters."""
        return f"{self.prefix}jobs/{quote(job, safe='')}"

    def publish_job(self, record: JobRecord, lease_s: float) -> None:
        """Write ``record``. It vanishes unless it is written again within ``lease_s``."""
        self.store.put(self.job_key(record.job), msgspec.json.encode(record), lease_s)

    def remove_job(self, job: str) -> None:
        """Delete the record of ``job``, so that the others don't wait for its lease to end."""
        self.store.delete(self.job_key(job))

    def publish_topology(self, topology: bytes) -> None:
        """Write the cluster's topology. All read what was written last."""
        self.store.put(self.topology_key, topology)

    def renew_topology(self, topology: bytes) -> None:
        """Write ``topology`` again before its lease ends, unless another one has replaced it."""
        self._write_again(self.topology_key, topology, MAX_LEASE_S)

    def publish_fragment(self, job: str, fragment: bytes | None) -> None:
        """Write what ``job`` saw of the network; None: nothing."""
        key = self.fragments_prefix + quote(job, safe="")
        if fragment is None:
            self.store.delete(key)
        else:
            self.store.put(key, fragment)

    def look(self) -> View:
        """Read everything at once; return the same view again if nothing has changed.

        Of jobs, ``MAX_JOBS`` at most. Unchanged values are not decoded again: many jobs look
        several times a second.
        """
        found = self.store.list(self.prefix)
        if found is self._found or found == self._found:
            return self._view
        jobs, plan = self._view.jobs, self._view.plan
        if self._take_records(found):
            known = [record for _, record in self._records.values() if record is not None]
            jobs = tuple(sorted(known, key=attrgetter("job")))
        if found.get(self.plan_key) != plan.raw:
            plan = self._plan(found.get(self.plan_key))
        if self._older_plan_key in found:
            self._warn(
                self._older_plan_key,
                "jobs of an older release of Crux plan apart, from the same records: give all jobs "
                "of a cluster the same release",
            )
        operator, raw = self._view.operator, found.get(self.operator_key)
        if raw != self._view.operator_raw:
            operator = self._operator(raw)
        self._found = found
        fragments: Mapping[str, bytes] = _fragments_in(found, self.fragments_prefix)
        if fragments == self._view.fragments:
            fragments = self._view.fragments
        topology = found.get(self.topology_key)
        self._view = View(jobs, topology, plan, operator, raw, fragments)
        return self._view

    def _take_records(self, found: Mapping[str, bytes]) -> bool:
        """Decode the records in ``found`` that have changed; return True if any has."""
        prefix, before = self.prefix + "jobs/", self._found
        keys = [key for key, raw in found.items() if before.get(key) != raw]
        keys += [key for key in before if key not in found]
        keys = [key for key in keys if key.startswith(prefix)]
        if not keys:
            return False
        records = {key: raw for key, raw in found.items() if key.startswith(prefix)}
        if len(records) > MAX_JOBS or len(self._records) >= MAX_JOBS:
            self._records = {
                key: (records[key], self._record(key, records[key]))
                for key in sorted(records)[:MAX_JOBS]
            }
            return True
        for key in keys:
            raw = records.get(key)
            if raw is None:
                self._records.pop(key, None)
            else:
                self._records[key] = raw, self._record(key, raw)
        return True

    def glance(self, jobs: Collection[str] | None) -> View:
        """Read a follower's part.

        Args:
            jobs: to read, beside the plan, the topology and the operator's settings; None: read
                the plan alone. All else is then as it was at the glance before.
        """
        before = self._glanced
        raw = self.store.get(self.plan_key)
        plan = before.plan if raw == before.plan.raw else self._plan(raw)
        if jobs is None:
            self._glanced = replace(before, plan=plan)
            return self._glanced
        found = {key: self.store.get(key) for key in map(self.job_key, sorted(jobs))}
        records = (self._record(key, raw) for key, raw in found.items() if raw is not None)
        operator, operator_raw = before.operator, self.store.get(self.operator_key)
        if operator_raw != before.operator_raw:
            operator = self._operator(operator_raw)
        topology = self.store.get(self.topology_key)
        known = tuple(record for record in records if record is not None)
        fragments = {} if topology is not None else self._fragments_of(jobs)
        self._glanced = View(known, topology, plan, operator, operator_raw, fragments)
        return self._glanced

    def _fragments_of(self, jobs: Iterable[str]) -> dict[str, bytes]:
        keys = {job: self.fragments_prefix + quote(job, safe="") for job in jobs}
        found = {job: self.store.get(key) for job, key in sorted(keys.items())}
        return {job: raw for job, raw in found.items() if raw is not None}

    def seats(self) -> dict[str, bytes]:
        """Return the holders of the planners' seats, by the seat's name, as they were written."""
        found = self.store.list(self.seats_prefix)
        return {key.removeprefix(self.seats_prefix): raw for key, raw in found.items()}

    def swap_seat(self, seat: str, before: bytes | None, after: bytes, lease_s: float) -> bool:
        """Write ``after`` in place of ``before``; return False if another was first."""
        return self.store.compare_and_swap(self.seats_prefix + seat, before, after, lease_s)

    def swap_plan(self, before: PlanState, after: StoredPlan) -> bytes | None:
        """Write ``after`` over ``before``; return its bytes, or None if another was first."""
        return self._swap(before, msgspec.json.encode(after))

    def renew_plan(self, before: PlanState) -> bytes | None:
        """Write the plan in ``before`` with another renewal; return as :meth:`swap_plan` does."""
        renewed = msgspec.json.decode(before.raw or b"", type=_Renewed)
        renewed.renewal = (renewed.renewal + 1) % (1 << 62)
        return self._swap(before, msgspec.json.encode(renewed))

    def put_part(self, job: str, raw: bytes) -> None:
        """Write the encoded :class:`StoredEntry` of ``job``, for that job's leader."""
        self.store.put(self.parts_prefix + quote(job, safe=""), raw)

    def parts(self) -> dict[str, bytes]:
        """Return the parts that were written, by job, as they were written."""
        found = self.store.list(self.parts_prefix)
        return {unquote(key.removeprefix(self.parts_prefix)): raw for key, raw in found.items()}

    def part(self, job: str, digest: str) -> PlanEntry | None:
        """Return the entry of ``job`` that this digest names; None if there is none of use."""
        key = self.parts_prefix + quote(job, safe="")
        found = self._decoded(StoredEntry, key, self.store.get(key), "an entry of the plan")
        fits = found is not None and found.digest == digest and found.entry.job == job
        return found.entry if found is not None and fits else None

    def publish_follows(self, job: str, follows: StoredEntry | None) -> None:
        """Write the entry that ``job`` follows, for status commands; None: none."""
        self._publish(self.follows_prefix, job, follows)

    def follows(self, head: PlanHead) -> dict[str, PlanEntry]:
        """Return the entries of that plan which jobs say they follow, by job."""
        found = self._by_job(StoredEntry, self.follows_prefix, None, "an entry of the plan")
        return {
            stored.entry.job: stored.entry
            for stored in found.values()
            if stored.digest == head.digest_for(stored.entry.job)
        }

    def publish_measured(self, job: str, measured: Measured | None) -> None:
        """Write what ``job`` measures, for the judge of its component; None: nothing."""
        self._publish(self.measured_prefix, job, measured)

    def measured(self, jobs: Sequence[str] | None) -> dict[str, Measured]:
        """Return what these jobs have measured, by job; None: all jobs."""
        return self._by_job(Measured, self.measured_prefix, jobs, "what a job measured")

    def publish_steps(
        self, job: str, steps: StepTimes | None, lease_s: float = MAX_LEASE_S
    ) -> None:
        """Write the step times of ``job`` for ``lease_s``; None: nothing."""
        self._publish(self.steps_prefix, job, steps, lease_s)

    def steps(self) -> dict[str, StepTimes]:
        """Return the published step times, by job."""
        return self._by_job(StepTimes, self.steps_prefix, None, "what a job's steps take")

    def programs(self) -> tuple[ProgramRecord, ...]:
        """Return the programs that run under ``crux exec``, by name, host and process."""
        found = self._by_job(ProgramRecord, self.programs_prefix, None, "a program of `crux exec`")
        return tuple(sorted(found.values(), key=attrgetter("name", "host", "pid")))

    def swap_operator(
        self, before: bytes | None, after: OperatorSettings, lease_s: float = MAX_LEASE_S
    ) -> bool:
        """Write ``after`` in place of ``before``; return False if another was first."""
        raw = msgspec.json.encode(after)
        return self.store.compare_and_swap(self.operator_key, before, raw, lease_s)

    def keep_operator(self, raw: bytes, lease_s: float) -> None:
        """Write the operator's settings again: before their lease ends, or after a loss."""
        self._write_again(self.operator_key, raw, lease_s)

    def operator_origin(self) -> str:
        """Return the address that wrote the operator's settings; empty if it is not known."""
        try:
            return self.store.origin(self.operator_key)
        except StoreError:
            return ""

    def append_audit(self, entry: AuditEntry) -> None:
        """Write ``entry`` over the oldest one of its kind."""
        self.store.put(self.audit_prefix + entry.slot, msgspec.json.encode(entry))

    def audit(self) -> tuple[AuditEntry, ...]:
        """Return the audit log, the oldest entry first."""
        found = self._by_job(AuditEntry, self.audit_prefix, None, "an entry of the audit log")
        return tuple(sorted(found.values(), key=lambda entry: (entry.at_s, entry.after)))

    def _write_again(self, key: str, raw: bytes, lease_s: float) -> None:
        """Write ``raw`` where it lies, or where nothing does."""
        for before in (raw, None):
            if self.store.compare_and_swap(key, before, raw, lease_s):
                return

    def _publish(
        self, prefix: str, job: str, value: msgspec.Struct | None, lease_s: float = MAX_LEASE_S
    ) -> None:
        key = prefix + quote(job, safe="")
        if value is None:
            self.store.delete(key)
        else:
            self.store.put(key, msgspec.json.encode(value), lease_s)

    def _by_job(
        self, kind: type[R], prefix: str, jobs: Sequence[str] | None, what: str
    ) -> dict[str, R]:
        """Return the usable values under ``prefix``, by the end of their keys."""
        found: Mapping[str, bytes | None]
        if jobs is None:
            found = self.store.list(prefix)
        else:
            found = {key: self.store.get(key) for key in (prefix + quote(j, safe="") for j in jobs)}
        values = {key: self._decoded(kind, key, raw, what) for key, raw in found.items()}
        return {
            unquote(key.removeprefix(prefix)): value
            for key, value in values.items()
            if value is not None
        }

    def _decoded(self, kind: type[R], key: str, raw: bytes | None, what: str) -> R | None:
        """Return the record in ``raw``; None, with one warning, if it can't be used."""
        if raw is None:
            return None
        try:
            found = decode(kind, raw, key)
            if isinstance(found, JobRecord) and self.job_key(found.job) != key:
                raise RecordError(f"{key}: it is of job {found.job!r}")
        except RecordError as error:
            self._warn(key, f"ignoring {what}: {error}")
            return None
        self._warn.forget(key)
        return found

    def _operator(self, raw: bytes | None) -> OperatorSettings:
        found = self._decoded(OperatorSettings, self.operator_key, raw, "the operator's settings")
        return found or OperatorSettings()

    def _record(self, key: str, raw: bytes) -> JobRecord | None:
        before = self._records.get(key)
        if before is not None and before[0] == raw:
            return before[1]
        return self._decoded(JobRecord, key, raw, "a job record")

    def _plan(self, raw: bytes | None) -> PlanState:
        return PlanState(raw, self._decoded(StoredPlan, self.plan_key, raw, "the plan"))

    def _swap(self, before: PlanState, raw: bytes) -> bytes | None:
        return raw if self.store.compare_and_swap(self.plan_key, before.raw, raw) else None


def _fragments_in(found: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    """Return the fragments among the values of the store, by job."""
    keys = [key for key in found if key.startswith(prefix)]
    return {unquote(key.removeprefix(prefix)): found[key] for key in sorted(keys)[:MAX_JOBS]}
