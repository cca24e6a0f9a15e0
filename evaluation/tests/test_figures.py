"""Figures are drawn from result files only, and say what is wrong with one."""

from __future__ import annotations

import copy
import json
import struct
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from evaluation.__main__ import evaluation
from evaluation.figures.catalogue import PLATES, draw_all
from evaluation.figures.fields import ResultError, Value
from evaluation.figures.style import COLOURS, LABELS, in_order

SPREAD = {"median": 0.8, "p10": 0.7, "p90": 0.9}
EDGES = [1e13, 1e14, 1e15]


def row_of_testbed(figure: int, scheduler: str) -> dict[str, Any]:
    kinds = ("bert", "resnet") if figure > 20 else ("gpt", "bert")
    jct = {"median": -10.0, "p10": -12.0, "p90": -8.0}
    return {
        "figure": figure,
        "case": "A-8 + 2 B-8",
        "scheduler": scheduler,
        "utilization": SPREAD,
        "gain_pct": {"median": 11.0, "p10": 9.0, "p90": 13.0},
        "jobs": {kind: {"jct_pct": jct} for kind in kinds},
        "paper": {"gain_pct": [8.3, 12.9], "jct_pct": {"bert": [0.0, 3.0]}},
    }


def trace_row(topology: str, placement: str, scheduler: str) -> dict[str, Any]:
    carried = [[0.0, 0.1, 0.2, 0.0], [0.0, 0.3, 0.1, 0.05]]
    return {
        "topology": topology,
        "placement": placement,
        "scheduler": scheduler,
        "gpu_utilization": 0.5,
        "series": {
            "time_s": [0.0, 21600.0, 43200.0],
            "gpu_utilization": [0.4, 0.6],
            "carried": {"pcie-nic": carried, "nic-tor": carried, "tor-aggregation": carried},
        },
    }


def saturated_row(network: str, placement: str, scheduler: str, seed: int) -> dict[str, Any]:
    return {
        "network": network,
        "oversubscription": 4,
        "placement": placement,
        "seed": seed,
        "scheduler": scheduler,
        "gpu_utilization": 0.5 + seed / 10,
        "starved": seed,
        "paper_gpu_utilization": 0.62 if scheduler == "crux-paper" else None,
    }


def optimality_row(mechanism: str, scheduler: str) -> dict[str, Any]:
    return {
        "mechanism": mechanism,
        "scheduler": scheduler,
        "share_mean": 0.98,
        "paper_share": 0.97 if scheduler == "crux-paper" else None,
        "error_cdf": [[0.0, 0.0], [0.0, 0.5], [0.05, 1.0]],
    }


def results() -> dict[str, dict[str, Any]]:
    saturated_cells = [
        *product(("clos", "double-sided"), ("hosts",), ("ecmp", "taccl", "crux-paper")),
        *product(("clos",), ("muri", "hived"), ("ecmp", "crux-paper")),
    ]
    rows = {
        "testbed": [
            row_of_testbed(n, s) for n in (19, 20, 21, 22) for s in ("ecmp", "crux-paper", "ideal")
        ],
        "trace": [trace_row("clos", "none", s) for s in ("ecmp", "taccl", "crux-paper")],
        "saturated": [saturated_row(*cell, seed) for cell in saturated_cells for seed in (0, 1)],
        "optimality": [
            optimality_row(m, s)
            for m in ("paths", "priority", "compression")
            for s in ("crux-paper", "sincronia", "one that has no colour")
        ],
    }
    rows["dispatch"] = [
        {
            "study": "efficacy",
            "hosts": "4090+V100+A6000+A800",
            "link_GBps": links,
            "gbe": {"strongest, links fitted": [0.9, 1.0], "by index": [0.3, 0.4]},
            "by_k": {"strongest, links fitted": {"2": 1.0, "10": 0.9}, "by index": {"2": 0.1}},
        }
        for links in ("20 to 40", "60")
    ]
    rows["cassini"] = [
        {
            "figure": 15,
            "snapshot": snapshot,
            "scheme": scheme,
            "paper_score": 0.9,
            "step_s": 0.005,
            "used": [0.0, 1.0, 0.8],
        }
        for snapshot in (1, 2)
        for scheme in ("themis", "th+cassini")
    ]
    settings = {"trace": {"intensity_edges": EDGES}}
    return {
        name: {"benchmark": name, "settings": settings.get(name, {}), "rows": found}
        for name, found in rows.items()
    }


def written(folder: Path, plain: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in plain.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def command(*arguments: object) -> Result:
    return CliRunner().invoke(evaluation, ["figures", *map(str, arguments)])


def png_size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.slow
def test_every_figure_is_drawn_and_put_on_the_page(tmp_path: Path) -> None:
    folder = written(tmp_path / "results", results())
    ran = command(folder, "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    page = (tmp_path / "out" / "figures.html").read_text()
    assert page.count("data:image/png;base64,") == len(PLATES)
    assert 'src="http' not in page
    for plate in PLATES:
        width, height = png_size(tmp_path / "out" / f"{plate.name}.png")
        assert width > 500
        assert height > 300
        assert f'id="{plate.name}"' in page
        assert f"python -m evaluation {plate.benchmark} " in page


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    plain = {"optimality": results()["optimality"]}
    folder = written(tmp_path / "results", plain)
    outs = [tmp_path / name for name in ("a", "b")]
    for out in outs:
        assert command(folder, "--out", out).exit_code == 0
    first, second = ((out / "figure16.png").read_bytes() for out in outs)
    assert first == second


def test_figures_without_a_file_are_left_out_and_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "results", {"testbed": results()["testbed"]})
    ran = command(folder, "--out", tmp_path / "out")
    assert ran.exit_code == 0
    assert "Figure 16 is not drawn" in ran.stderr
    assert "trace.json is missing" in ran.stderr
    assert "Figure 23" in (tmp_path / "out" / "figures.html").read_text()
    assert not (tmp_path / "out" / "figure23.png").exists()


def test_figures_without_their_rows_are_left_out(tmp_path: Path) -> None:
    plain = results()
    plain["testbed"]["rows"] = [row_of_testbed(20, "ecmp"), row_of_testbed(20, "crux-paper")]
    plain["trace"]["rows"] = [trace_row("double-sided", "none", "crux-paper")]
    plain["saturated"]["rows"] = [saturated_row("double-sided", "hosts", "crux-paper", 0)]
    plain["dispatch"]["rows"] = plain["dispatch"]["rows"][:1]
    plain["cassini"]["rows"] = [{"figure": 11}]
    drawn, left_out = draw_all(written(tmp_path, plain))
    assert [item.plate.number for item in drawn] == [16, 20, 23, 9]
    assert {item.plate.number for item in left_out} == {19, 21, 22, 24, 25, 10, 15}
    assert all("has no rows for it" in item.reason for item in left_out)


def test_bars_are_means_of_all_gpus_where_links_up_are_oversubscribed(tmp_path: Path) -> None:
    rows = [saturated_row("clos", "hosts", "crux-paper", seed) for seed in (0, 1)]
    rows += [{**row, "oversubscription": 1, "gpu_utilization": 0.9} for row in rows]
    plain = {"saturated": {"benchmark": "saturated", "settings": {}, "rows": rows}}
    ((only,), _) = draw_all(written(tmp_path, plain))
    (axes,) = only.figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([55.0])
    assert [text.get_text() for text in axes.texts] == ["55.0, 0.5 jobs starve"]
    assert [62.0] in [list(line.get_xdata()) for line in axes.lines]


def test_no_result_file_at_all(tmp_path: Path) -> None:
    ran = command(tmp_path, "--out", tmp_path / "out")
    assert ran.exit_code == 1
    assert "no result file that a figure could be drawn from" in ran.output


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("testbed", ("rows", 0, "utilization", "median"), "x", "rows[0].utilization.median is 'x'"),
        ("testbed", ("rows", 1, "gain_pct"), 3, "rows[1].gain_pct has no 'median'"),
        ("testbed", ("rows", 2, "figure"), None, "rows[2].figure is None; expected a number"),
        ("trace", ("rows", 1, "series", "carried", "nic-tor", 1), [0.5], "expected 4 numbers"),
        ("trace", ("settings",), {}, "settings has no 'intensity_edges'"),
        ("saturated", ("rows", 1, "starved"), "no", "rows[1].starved is 'no'; expected a number"),
        ("optimality", ("rows", 0, "error_cdf"), 4, "rows[0].error_cdf is 4; expected a list"),
        ("optimality", ("rows",), [], "rows is empty; expected one or more"),
        ("optimality", ("rows",), 7, "rows is 7; expected a list"),
    ],
)
def test_a_bad_value_is_named(
    name: str, path: tuple[Any, ...], value: object, words: str, tmp_path: Path
) -> None:
    plain = copy.deepcopy(results())
    at: Any = plain[name]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    folder = written(tmp_path / "results", {name: plain[name]})
    ran = command(folder, "--out", tmp_path / "out")
    assert ran.exit_code == 1
    assert f"{name}.json" in ran.output
    assert words in ran.output
    assert "Traceback" not in ran.output


def test_a_value_knows_its_place() -> None:
    value = Value(Path("f.json"), "settings", {"a": {"b": [1, True]}})
    assert value["a.b"].items()[0].number() == 1.0
    assert value.get("c") is None
    with pytest.raises(ResultError, match=r"f.json: settings.a.b\[1\] is True; expected a number"):
        value["a.b"].numbers()


def test_schedulers_have_one_colour_and_one_label() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(LABELS) == set(COLOURS)
    assert in_order(["other", "ideal", "crux-paper", "ecmp", "crux-paper"]) == [
        "ecmp",
        "crux-paper",
        "ideal",
        "other",
    ]
