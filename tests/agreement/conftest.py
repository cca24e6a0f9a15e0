"""A simulated clock, and the store that goes by it."""

from __future__ import annotations

import pytest
from control_fakes import FakeClock, MemoryStore


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)
