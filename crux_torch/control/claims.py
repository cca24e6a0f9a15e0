"""Which devices of a host the launchers of running jobs have taken: one leased record for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from crux_torch.control.records import RecordError
from crux_torch.control.registry import decode
from crux_torch.measure.job_profile import Name
from crux_torch.store.shared_store import SharedStore
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)


class DeviceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a device.

    Attributes:
        job, incarnation: the job, and the launcher that took the device for it.
        index: the device's number on its host, in the order of PCI addresses.
    """

    job: Name
    incarnation: Name
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class DeviceClaims:
    """The devices of one cluster that are taken.

    Every method raises :class:`~crux_torch.errors.StoreError` if the store does.
    """

    def __init__(self, store: SharedStore, cluster: str) -> None:
        self._store = store
        self._prefix = f"crux/{quote(cluster, safe='')}/devices/"
        self._warn = WarnOnce(_log)

    def taken(self) -> dict[str, dict[str, DeviceClaim]]:
        """Claims by host, and by the device's UUID. What can't be read is left out."""
        found: dict[str, dict[str, DeviceClaim]] = {}
        for key, raw in self._store.list(self._prefix).items():
            host, _, device = key.removeprefix(self._prefix).partition("/")
            try:
                claim = decode(DeviceClaim, raw, key)
            except RecordError as error:
                self._warn(key, f"ignoring a claim on a device: {error}")
                continue
            found.setdefault(unquote(host), {})[unquote(device)] = claim
        return found

    def take(self, host: str, claims: Mapping[str, DeviceClaim], lease_s: float) -> bool:
        """Claim devices, by UUID, all or none; False if another launcher was first with one."""
        mine: dict[str, DeviceClaim] = {}
        for device, claim in claims.items():
            raw = msgspec.json.encode(claim)
            if not self._store.compare_and_swap(self._key(host, device), None, raw, lease_s):
                self.release(host, mine)
                return False
            mine[device] = claim
        return True

    def renew(self, host: str, claims: Mapping[str, DeviceClaim], lease_s: float) -> None:
        """Keep what was claimed for another ``lease_s``, but for what somebody else has by now."""
        for device, claim in claims.items():
            raw, key = msgspec.json.encode(claim), self._key(host, device)
            for before in (raw, None):
                if self._store.compare_and_swap(key, before, raw, lease_s):
                    break

    def release(self, host: str, claims: Mapping[str, DeviceClaim]) -> None:
        """Give up what was claimed, but for what somebody else has by now."""
        for device, claim in claims.items():
            key = self._key(host, device)
            if self._store.get(key) == msgspec.json.encode(claim):
                self._store.delete(key)

    def _key(self, host: str, device: str) -> str:
        return f"{self._prefix}{quote(host, safe='')}/{quote(device, safe='')}"
