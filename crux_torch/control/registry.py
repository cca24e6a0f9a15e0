"""Typed access to what a cluster keeps in the store. Bytes that others wrote are validated here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec

from crux_torch.control.records import (
    MAX_JOBS,
    MAX_RECORD_BYTES,
    SCHEMA_VERSION,
    JobRecord,
    Plan,
    RecordError,
)
from crux_torch.store.shared_store import SharedStore
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it lies in the store.

    Attributes:
        renewal: changes with every renewal, so that each reader sees by its own clock when the
            plan was last confirmed.
    """

    renewal: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    plan: Plan


class _Renewed(msgspec.Struct, kw_only=True):
    """A stored plan whose renewal alone is read, so that a newer release's fields stay in it."""

    renewal: int
    plan: msgspec.Raw


class _Versioned(msgspec.Struct):
    """What tells a record's version, whatever else is in it."""

    version: int | None = None
    plan: _Versioned | None = None


@dataclass(frozen=True, slots=True)
class PlanState:
    """The plan's key as it was read: its bytes, which a swap must expect, and the plan in them.

    ``stored`` is None if there is no plan or none that can be used.
    """

    raw: bytes | None
    stored: StoredPlan | None


def decode(kind: type[R], raw: bytes, where: str) -> R:
    """The record in ``raw``, found at ``where``. Fields that are not known are left out.

    Raises:
        RecordError: it is malformed, too large, or of another version of the schema.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordError(f"{where}: {len(raw)} bytes, limit {MAX_RECORD_BYTES}")
    try:
        told = msgspec.json.decode(raw, type=_Versioned)
        version = told.version if told.plan is None else told.plan.version
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
        self.prefix = f"crux/{quote(cluster, safe='')}/"
        self.plan_key = self.prefix + "plan"
        self.topology_key = self.prefix + "topology"
        self._warn = WarnOnce(_log)

    def job_key(self, job: str) -> str:
        """Key of the record of ``job``, whose name may have any characters."""
        return f"{self.prefix}jobs/{quote(job, safe='')}"

    def publish_job(self, record: JobRecord, lease_s: float) -> None:
        """Write ``record``. It vanishes unless it is written again within ``lease_s``."""
        self.store.put(self.job_key(record.job), msgspec.json.encode(record), lease_s)

    def remove_job(self, job: str) -> None:
        """Delete the record of ``job``, so that the others don't wait for its lease to end."""
        self.store.delete(self.job_key(job))

    def jobs(self) -> tuple[JobRecord, ...]:
        """The live, valid records, in the order of their names; ``MAX_JOBS`` at most."""
        records = []
        for key, raw in sorted(self.store.list(self.prefix + "jobs/").items())[:MAX_JOBS]:
            try:
                record = decode(JobRecord, raw, key)
                if self.job_key(record.job) != key:
                    raise RecordError(f"{key}: it is of job {record.job!r}")
            except RecordError as error:
                self._warn(key, f"ignoring a job record: {error}")
            else:
                self._warn.forget(key)
                records.append(record)
        return tuple(sorted(records, key=lambda record: record.job))

    def publish_topology(self, topology: bytes) -> None:
        """Write the cluster's topology. All read what was written last."""
        self.store.put(self.topology_key, topology)

    def renew_topology(self, topology: bytes) -> None:
        """Write ``topology`` again before its lease ends, unless another one has replaced it."""
        for before in (topology, None):
            if self.store.compare_and_swap(self.topology_key, before, topology):
                return

    def topology(self) -> bytes | None:
        """The cluster's topology as it was published, not validated."""
        return self.store.get(self.topology_key)

    def plan(self) -> PlanState:
        """The plan in the store."""
        raw = self.store.get(self.plan_key)
        if raw is None:
            return PlanState(None, None)
        try:
            stored = decode(StoredPlan, raw, self.plan_key)
        except RecordError as error:
            self._warn(self.plan_key, f"ignoring the plan: {error}")
            return PlanState(raw, None)
        self._warn.forget(self.plan_key)
        return PlanState(raw, stored)

    def swap_plan(self, before: PlanState, after: StoredPlan) -> bytes | None:
        """The bytes of ``after``, written in place of ``before``; None if another was first."""
        return self._swap(before, msgspec.json.encode(after))

    def renew_plan(self, before: PlanState) -> bytes | None:
        """The bytes of the plan in ``before`` with another renewal, if they took its place."""
        renewed = msgspec.json.decode(before.raw or b"", type=_Renewed)
        renewed.renewal = (renewed.renewal + 1) % (1 << 62)
        return self._swap(before, msgspec.json.encode(renewed))

    def _swap(self, before: PlanState, raw: bytes) -> bytes | None:
        return raw if self.store.compare_and_swap(self.plan_key, before.raw, raw) else None
