"""Crux beside the paper's wording: the table, its document, and that nothing stays changed."""

from __future__ import annotations

import json
from pathlib import Path

from crux_torch.schedule import correction, crux
from crux_torch.schedule.contention_dag import Edges
from evaluation.beyond import small
from evaluation.paper_variants import VARIANTS, measure, table

ROOT = Path(__file__).parents[2]


def test_the_document_holds_the_table_of_the_results_file() -> None:
    results = json.loads((ROOT / "benchmarks/results/variants.json").read_text())
    printed = table(results["rows"])
    assert printed == (ROOT / "benchmarks/results/variants.txt").read_text()
    assert printed in (ROOT / "docs/schedulers.md").read_text()


def test_every_variant_is_measured_and_undone() -> None:
    whole = (crux.reference_job, crux.correction_factors, correction.K_MAX)
    orders = Edges.random_start_times
    rows = list(measure(small(3), 30.0))
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert all(0.5 < row["ratio"] < 2.0 for row in rows)
    assert whole == (crux.reference_job, crux.correction_factors, correction.K_MAX)
    assert orders is Edges.random_start_times


def test_the_lines_of_crux_in_the_document_are_those_of_the_source() -> None:
    page = (ROOT / "docs/schedulers.md").read_text()
    section = page[page.index("## The paper's §4, line by line") :].split("\n\n")[2]
    source = (ROOT / "crux_torch/schedule/crux.py").read_text()
    rows = [row.split(" | ") for row in section.splitlines()[2:]]
    assert len(rows) > 10
    for _, function, line in rows:
        assert f"def {function.strip('`')}(" in source
        assert line.removesuffix(" |").strip("`") in source
