"""A host's connection to the service of the load tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from crux_torch.control.tables_frames import (
    Answer,
    Feedback,
    FetchFeedback,
    Request,
    UpdateSchedule,
    answer_decoder,
)
from crux_torch.errors import Cause, StoreError
from crux_torch.store.causes import cause_of
from crux_torch.store.client import Connection, Connector
from crux_torch.store.frames import Done, Refused
from crux_torch.store.marked_socket import mark

#: Seconds that one exchange may take, connecting included, and from a failure to the next attempt.
TIMEOUT_S = 0.2
RETRY_S = 1.0

A = TypeVar("A", bound=Answer)


class TablesClient:
    """Asks the service; not safe for use by several threads.

    Args:
        connector: makes the connections to it.
        secret: of the store, which the service shares.
        dscp: class of its packets, 0 to 63. They cross the queues that the tables are about.
        clock: paces the attempts to connect again.

    Every call raises StoreError where there is no answer in time.
    """

    def __init__(
        self,
        connector: Connector,
        secret: bytes = b"",
        *,
        dscp: int = 0,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._where = connector.where.replace("store", "load tables at", 1)
        self._secret, self._dscp = secret, dscp
        self._timeout_s = timeout_s
        self._clock = clock
        self._connection: Connection | None = None
        self._retry_at_s = float("-inf")

    def fetch_feedback(self, flow: str, links: Mapping[str, float]) -> Feedback:
        """How loaded the path of ``flow`` is.

        Args:
            links: capacity of each link, in bytes per second.
        """
        answer = self._ask(FetchFeedback(flow, dict(links)), Feedback)
        if len(answer.loads_Bps) != len(links) or not all(answer.loads_Bps):
            raise self._failed("an answer about another path", Cause.STRANGER)
        return answer

    def update_schedule(self, schedule: UpdateSchedule) -> bool:
        """Whether these rates are booked."""
        return self._ask(schedule, Done).count > 0

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: Request, kind: type[A]) -> A:
        deadline_s = time.monotonic() + self._timeout_s
        if self._connection is None and self._clock() < self._retry_at_s:
            raise StoreError(f"{self._where}: another attempt is not due yet")
        try:
            if self._connection is None:
                connected = self._connector.connect(self._timeout_s)
                try:
                    if self._dscp:
                        mark(connected, self._dscp)
                    self._connection = Connection(connected, self._secret, deadline_s)
                except BaseException:
                    connected.close()
                    raise
            answer = self._connection.ask(request, deadline_s, answer_decoder)
        except (OSError, EOFError, ValueError) as error:
            cause = cause_of(error, greeted=self._connection is not None)
            late = isinstance(error, TimeoutError)
            told = f"no answer within {self._timeout_s} s" if late else str(error)
            raise self._failed(told, cause) from None
        if isinstance(answer, Refused):
            raise StoreError(f"{self._where}: {answer.reason}")
        if not isinstance(answer, kind):
            raise self._failed("an answer to another question", Cause.STRANGER)
        return answer

    def _failed(self, reason: str, cause: Cause) -> StoreError:
        self.close()
        self._retry_at_s = self._clock() + RETRY_S
        return StoreError(f"{self._where}: {reason}", cause)
