"""What must outlive a store that forgets: the topology and the operator's settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from crux_torch.control.operator import OperatorSettings
from crux_torch.control.registry import Registry, View
from crux_torch.errors import StoreError
from crux_torch.store.shared_store import MAX_LEASE_S
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)


class KeptTopology:
    """Publishes the topology that this job knows, and renews it.

    Args:
        published: the topology; None: this job knows none.
    """

    def __init__(self, registry: Registry, published: bytes | None, warn: WarnOnce) -> None:
        self._registry = registry
        self._published = published
        self._warn = warn
        self._is_there = False
        self._renew_at_s = float("-inf")

    def keep(self, now_s: float) -> None:
        """Write what is due. One that the store refuses must not keep the job from the plan.

        Raises:
            StoreError: if the store can't be reached to renew it.
        """
        if self._published is None:
            return
        if not self._is_there:
            try:
                self._registry.publish_topology(self._published)
            except StoreError as error:
                self._warn("topology", f"the topology was not published: {error}")
            else:
                self._is_there = True
        elif now_s >= self._renew_at_s:
            self._registry.renew_topology(self._published)
        else:
            return
        self._renew_at_s = now_s + MAX_LEASE_S / 3

    def publish_again(self) -> None:
        """The store may have lost it."""
        self._is_there = False


class KeptSettings:
    """Writes the operator's settings again before their lease ends, and where the store lost them.

    Those that tell no end and are not to stay end with their writer's lease. A tenant's role may
    not write any.

    Args:
        retry_s: seconds between two attempts while they are lost.
        now_s: seconds since 1970, for the end that the settings tell.
    """

    def __init__(
        self, registry: Registry, retry_s: float, now_s: Callable[[], float] = time.time
    ) -> None:
        self._registry = registry
        self._retry_s = retry_s
        self._now_s = now_s
        #: As they were seen last, and when they are due to be written.
        self._seen: bytes | None = None
        self._settings = OperatorSettings()
        self._lost = False
        self._keep_at_s = float("inf")

    def keep(self, view: View, now_s: float) -> None:
        """Write what is due after ``view`` of the store."""
        if view.operator.revision and view.operator_raw != self._seen:
            self._seen, self._settings = view.operator_raw, view.operator
            self._keep_at_s = now_s + MAX_LEASE_S / 3
        lease_s = self._settings.lease_s(self._now_s())
        if self._seen is None or not lease_s:
            return
        lost, before = view.operator_raw is None, self._lost
        self._lost = lost
        if now_s < self._keep_at_s and (before or not lost):
            return
        self._keep_at_s = now_s + (self._retry_s if lost else MAX_LEASE_S / 3)
        try:
            self._registry.keep_operator(self._seen, lease_s)
        except StoreError as error:
            _log.debug("the operator's settings were not written again: %s", error)
