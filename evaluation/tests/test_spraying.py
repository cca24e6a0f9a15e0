"""The spraying study: on a network that sprays, what chooses paths has nothing to choose."""

from __future__ import annotations

from evaluation.spraying import rows_of, table


def test_a_short_run_has_a_row_for_each_network_and_scheduler() -> None:
    rows = list(rows_of(1, 20.0))
    assert [row["oversubscription"] for row in rows] == [1] * 10 + [2] * 10 + [4] * 10
    used = {
        (row["oversubscription"], row["balancing"], row["scheduler"]): row["gpu_utilization"][0]
        for row in rows
    }
    for ratio in (1, 2, 4):
        # Spread evenly, no link of a job carries more than where its flows collide.
        assert used[ratio, "sprayed", "ecmp"] >= used[ratio, "hashed", "ecmp"]
    assert used[4, "sprayed", "ecmp"] <= used[1, "sprayed", "ecmp"]
    assert table(rows).count("oversubscribed, 1 seeds") == 3
