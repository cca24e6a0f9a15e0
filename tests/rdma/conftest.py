"""One guest for all tests, and one run of each scenario whose results they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from lab.nccl import library
from lab.nccl.library import NcclUnavailableError
from lab.rdma import verbs_shim
from lab.rdma.guest import Guest
from lab.rdma.play import Outcome, play
from lab.rdma.requirement import LabUnavailableError

T = TypeVar("T")


@pytest.fixture(scope="session")
def guest() -> Guest:
    return _or_skip(Guest.prepare)


@pytest.fixture(scope="session")
def environment(guest: Guest) -> str:
    """Variables that put the shim before a program, as JSON."""
    return _or_skip(verbs_shim.environment)


@pytest.fixture(scope="session")
def pair(guest: Guest, environment: str, request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """Programs on two devices with a cable between them, without and with the shim."""
    try:
        libnccl = str(library.installed())
    except NcclUnavailableError:
        libnccl = ""
    outcome = play(guest, "pair", environment, libnccl, timeout_s=400)
    yield outcome
    _remove(outcome, request)


@pytest.fixture(scope="session")
def fabric(guest: Guest, environment: str, request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """Traffic through leaf and spine switches."""
    outcome = play(guest, "fabric", sys.executable, environment, timeout_s=200)
    yield outcome
    _remove(outcome, request)


def _or_skip(prepare: Callable[[], T]) -> T:
    try:
        return prepare()
    except LabUnavailableError as error:
        pytest.skip(f"no Soft-RoCE lab here: {error}")


def _remove(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    # What a failed test went by is left for who looks into it.
    if not request.session.testsfailed:
        outcome.remove()
