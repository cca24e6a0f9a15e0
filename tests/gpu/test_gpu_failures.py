"""Timeouts, aborts and NCCL's watchdog do under Crux what they do without."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rig.job import ATTACHED, STOCK, Job
from rig.kind import Kind
from rig.outcome import DIED, ERROR, VALUE, Outcome

BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
#: What comes late is the script's affair: it aborts.
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
#: The watchdog would first wait for every rank to write down what it did last.
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}


def _outcomes(kind: Kind, part: str, folder: Path, env: dict[str, str]) -> dict[str, list[Outcome]]:
    """Of both backends, whose jobs run side by side."""

    def run(mode: str) -> list[Outcome]:
        return Job(kind, mode, 2, (part,), limit_s=80.0, env=env).run(folder / mode)[part]

    modes = (STOCK, ATTACHED)
    with ThreadPoolExecutor() as pool:
        return dict(zip(modes, pool.map(run, modes), strict=True))


def test_a_late_rank_times_out(kind: Kind, pair: int, tmp_path: Path) -> None:
    found = _outcomes(kind, "a_late_rank_times_out", tmp_path, BLOCKING)
    stock, mine = found[STOCK][0], found[ATTACHED][0]
    assert stock.kind == ERROR, stock.value
    assert mine.same_as(stock), (mine, stock)


def test_an_abort_comes_back(kind: Kind, pair: int, tmp_path: Path) -> None:
    for mode, outcomes in _outcomes(kind, "an_abort_comes_back", tmp_path, NO_WATCHDOG).items():
        for outcome in outcomes:
            assert outcome.kind == VALUE, f"{mode}: {outcome.value}"


def test_the_watchdog_ends_a_process_that_hangs(kind: Kind, pair: int, tmp_path: Path) -> None:
    if not kind.is_cuda:
        pytest.skip("not on a fake device: NCCL's own watchdog")
    found = _outcomes(kind, "the_watchdog_ends_a_process_that_hangs", tmp_path, NO_DUMP)
    for mode, outcomes in found.items():
        assert outcomes[0].kind == DIED, f"{mode}: {outcomes[0].value}"
        assert f"code {-signal.SIGABRT}" in outcomes[0].value, f"{mode}: {outcomes[0].value}"
