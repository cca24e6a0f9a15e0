"""What the side-by-side comparison of mlcc makes of its turns."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import mlcc
from lab import mlcc_mixes
from lab.mlcc_mixes import MLCC, MODELS, PLAIN

MIX = mlcc.LIVE["vgg-20"]


def turn(name: str, round_: int, *step_s: float | None, **more: Any) -> list[dict[str, Any]]:
    """The rows of one turn: its own, and one for each job."""
    about = {"mix": MIX.name, "turn": name, "round": round_, "slot_ms": 60}
    head = {"overlap": 0.2, "drops": 3, "load": 1.0, "window_s": 12.0}
    jobs = [
        about
        | {"job": job, "step_s": s, "alone_s": 0.5, "paced": 0.4, "losses_equal": True, "steps": 20}
        | {"step_bytes": 5e6}
        for job, s in zip(MIX.jobs, step_s, strict=True)
    ]
    return [about | head | more, *jobs]


def result(*turns: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for rows in turns for row in rows]
    return {"settings": {"not_offered": ["dctcp"]}, "rows": rows}


def test_a_step_is_compared_with_that_of_its_round_under_cubic() -> None:
    found, text = mlcc.merged(
        [
            result(turn("cubic", 0, 1.0, 0.5), turn(MLCC, 0, 0.8, 0.5)),
            result(turn("cubic", 0, 2.0, 2.0), turn(MLCC, 0, 1.0, 1.0)),
        ]
    )
    ratios = mlcc.over_cubic(found.rows)
    assert ratios["cubic"] == [1.0, 1.0]
    # 10 MB over 25 MB/s take 0.4 s, less than each job alone.
    assert ratios[mlcc.BOUND] == pytest.approx([0.75, 0.25])
    assert ratios[MLCC] == pytest.approx([0.9, 0.5])
    assert "0.70 (0.50-0.90) of 2" in text
    assert "offers no dctcp" in text
    assert "DIFFER" not in text
    # A file of its own results is taken in again as it was.
    again, same = mlcc.merged([{"settings": found.settings, "rows": found.rows}])
    assert again.rows == found.rows
    assert same == text


def test_a_job_that_did_no_step_is_left_out() -> None:
    found, text = mlcc.merged([result(turn("cubic", 0, 1.0, 1.0), turn(MLCC, 0, None, 0.9))])
    assert mlcc.over_cubic(found.rows)[MLCC] == pytest.approx([0.9])
    assert "none" in text


def test_foreign_flows_are_compared_with_their_rate_beside_cubic() -> None:
    _, text = mlcc.merged(
        [
            result(
                turn("cubic", 0, 1.0, 1.0, foreign_Bps=1e6),
                turn(MLCC, 0, 1.0, 1.0, foreign_Bps=9.5e5),
            )
        ]
    )
    assert "foreign flows x cubic 0.95 (0.95-0.95)" in text


def test_different_losses_are_told() -> None:
    rows = turn("cubic", 0, 1.0, 1.0)
    rows[1]["losses_equal"] = False
    assert "LOSSES DIFFER" in mlcc.merged([result(rows)])[1]


def test_every_mix_is_compared_with_cubic() -> None:
    for mix in mlcc.LIVE.values():
        assert mix.turns[0] == "cubic"
        assert MLCC in mix.turns
        assert set(mix.jobs) <= set(MODELS)
    assert {"cubic", "bbr", "dctcp"} <= set(PLAIN)


def test_jobs_with_a_server_send_twice_as_much_over_the_link() -> None:
    mix = mlcc.LIVE["ps"]
    assert [mix.senders(job) for job in mix.jobs] == [1, 2]
    assert mix.fabric().spec.hosts_per_leaf == 2
    assert MIX.fabric().spec.hosts_per_leaf == 1


def test_broadcasts_that_wait_for_all_gradients_cost_a_job_alone_its_pipelining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mlcc_mixes, "HORIZON_S", 8.0)
    alone = mlcc_mixes.with_servers()["one alone"]
    # 1.2 s of computation, and 0.84 s of the server's link, each way.
    assert alone["start-after"] == pytest.approx((1.2 + 1.68) / (1.2 + 0.84), rel=0.02)
    assert alone["initial"] == alone["mlcc"] == pytest.approx(1.0, abs=1e-3)
