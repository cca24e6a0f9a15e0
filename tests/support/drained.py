"""The records that a recorder holds, as tests read them."""

from __future__ import annotations

import time
from typing import Any

from crux_torch.measure import records as rec

DEADLINE_S = 120.0


def drain(recorder: Any, count: int) -> rec.Records:
    """The next ``count`` records, and a check that there are no more.

    A thread of its own may complete an operation after wait() has returned: NCCL's watchdog, which
    looks once in a second at the slowest.
    """
    raw = b""
    deadline = time.monotonic() + DEADLINE_S
    while len(raw) < count * rec.RECORD.itemsize and time.monotonic() < deadline:
        raw += recorder.drain(count)
        time.sleep(0.001)
    records = rec.from_bytes(raw + recorder.drain(1 << 30))
    assert len(records) == count, [rec.OPS[op] for op in records["op"]]
    return records
