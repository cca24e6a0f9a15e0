"""Timeouts, aborts and NCCL's watchdog do under Crux what they do without."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig.job import ATTACHED, STOCK, Job, at_once
from rig.kind import Kind
from rig.outcome import DIED, ERROR, VALUE, Outcome
from rig.part import PAIR

BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
#: What comes late is the script's affair: it aborts.
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
#: The watchdog would first wait for every rank to write down what it did last.
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}


WATCHDOG = "the_watchdog_ends_a_process_that_hangs"
#: The parts with their variables.
PARTS = {"a_late_rank_times_out": BLOCKING, "an_abort_comes_back": NO_WATCHDOG, WATCHDOG: NO_DUMP}
Both = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    kind: Kind,
    pair_works: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Both]]:
    """What both backends did in a part; all jobs run side by side, for most of them wait."""
    chosen = {item.name.removeprefix("test_") for item in request.session.items}

    def run(part: str, mode: str) -> list[Outcome]:
        job = Job(kind, mode, PAIR, (part,), limit_s=300.0, env=PARTS[part])
        return job.run(tmp_path_factory.mktemp(part) / mode)[part]

    with ThreadPoolExecutor(at_once()) as pool:
        found = {
            part: {mode: pool.submit(run, part, mode) for mode in (STOCK, ATTACHED)}
            for part in PARTS
            if part in chosen and not pair_works
        }
        yield lambda part: {mode: each.result() for mode, each in found[part].items()}


def test_a_late_rank_times_out(pair: int, outcomes: Callable[[str], Both]) -> None:
    found = outcomes("a_late_rank_times_out")
    stock, mine = found[STOCK][0], found[ATTACHED][0]
    assert stock.kind == ERROR, stock.value
    assert mine.same_as(stock), (mine, stock)


def test_an_abort_comes_back(pair: int, outcomes: Callable[[str], Both]) -> None:
    for mode, ranks in outcomes("an_abort_comes_back").items():
        for outcome in ranks:
            assert outcome.kind == VALUE, f"{mode}: {outcome.value}"


def test_the_watchdog_ends_a_process_that_hangs(
    kind: Kind, pair: int, outcomes: Callable[[str], Both]
) -> None:
    for mode, (hung, _) in outcomes(WATCHDOG).items():
        assert hung.kind == DIED, f"{mode}: {hung.value}"
        assert f"code {-signal.SIGABRT}" in hung.value, f"{mode}: {hung.value}"
