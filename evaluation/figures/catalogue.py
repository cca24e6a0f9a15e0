"""The figures that are drawn, from which result files, and the page that shows them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from crux_torch.report.page import render
from evaluation.figures import cassini, dispatch, optimality, saturated, testbed, trace
from evaluation.figures.fields import ResultError, Value, read_rows
from evaluation.figures.style import SETTINGS

FOLDER = Path(__file__).parent


def write(
    drawn: Sequence[Drawn], left_out: Sequence[LeftOut], folder: Path
) -> tuple[list[Path], Path]:
    """Writes a PNG for each figure, and the page. Returns the PNGs and the page.

    Raises:
        ResultError: they can't be written.
    """
    images = [_png(item) for item in drawn]
    encoded = [base64.b64encode(image).decode("ascii") for image in images]
    shown = list(zip(drawn, encoded, strict=True))
    text = render(
        "figures.html.jinja",
        FOLDER,
        title="The evaluation's figures",
        drawn=shown,
        left_out=left_out,
    )
    files, page = [folder / f"{item.plate.name}.png" for item in drawn], folder / "figures.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, image in zip(files, images, strict=True):
            file.write_bytes(image)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{folder}: can't be written: {error}") from None
    return files, page


def _png(item: Drawn) -> bytes:
    buffer = io.BytesIO()
    # Neither date nor version stand in the file, so that the same result gives the same bytes.
    with matplotlib.rc_context(SETTINGS):
        item.figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


Draw = Callable[[Value, list[Value]], "Figure | None"]


@dataclass(frozen=True, slots=True)
class Plate:
    """A figure that can be drawn.

    Attributes:
        name: of the PNG, without its ending.
        number: in the paper; in LiteGD's or CASSINI's where the title begins with that.
        title: what it shows.
        benchmark: whose result file it is drawn from.
        caption: how to read it.
        paper: what the paper reports.
        draw: from settings and rows; None if the rows that it needs are not there.
        other: result files that are preferred to that of the benchmark's own name.
    """

    name: str
    number: int
    title: str
    benchmark: str
    caption: str
    paper: str
    draw: Draw
    other: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure and the file it was drawn from."""

    plate: Plate
    figure: Figure
    source: Path


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A figure that was not drawn, and why."""

    plate: Plate
    reason: str


def _testbed(number: int, settings: Value, rows: list[Value]) -> Figure | None:
    return testbed.draw(rows, number)


_TESTBED_CAPTION = (
    "Left: GPU utilisation, medians over draws of ECMP's hash and of start phases, whiskers from "
    "the 10th to the 90th percentile, and the gain of Crux over ECMP with fair sharing. Right: "
    "change of completion time by kind of job. “Alone” bars are jobs without contention, on the "
    "paths of ECMP's hash (as a job ran alone in the paper's testbed) and on paths that do not "
    "collide among themselves."
)
_SATURATED_CAPTION = (
    "Jobs of the trace hold nearly all GPUs, and each scheduler plans once. Links up are "
    f"oversubscribed {saturated.OVERSUBSCRIPTION}:1; without a job scheduler, jobs stand on random "
    "whole hosts. Bars: the share of all GPUs that compute, mean of the seeds, whiskers from the "
    "lowest to the highest. A job starves below 2% of its pace alone. Diamonds: the paper's, of "
    "its own trace, with its own placement and oversubscription."
)
PLATES: tuple[Plate, ...] = (
    Plate(
        "figure16",
        16,
        "Error of each mechanism from the optimum",
        "optimality",
        "Small cases whose optimum is found by playing every choice; one mechanism decides, the "
        "other two are at their optimum. Curves: the share of the cases whose GPU utilisation is "
        f"at most so far below the optimum; errors below {optimality.SMALLEST_PCT}% are drawn "
        "there. Diamonds: the mean that the paper reports, at half height.",
        "On average 97.69% of the optimum for paths, 97.24% for priorities and 97.12% for "
        "compression.",
        optimality.draw,
    ),
    Plate(
        "figure19",
        19,
        "GPT and several BERTs on shared network paths",
        "testbed",
        _TESTBED_CAPTION,
        "Utilisation +8.3 to +12.9%; completion time of GPT −11 to −25%, of BERT 0 to +3%.",
        partial(_testbed, 19),
    ),
    Plate(
        "figure20",
        20,
        "GPT, two ResNets and two BERTs on shared network paths",
        "testbed",
        _TESTBED_CAPTION,
        "Utilisation +13.9%; completion time of GPT −18%, of BERT −15%, of ResNet +2%.",
        partial(_testbed, 20),
    ),
    Plate(
        "figure21",
        21,
        "BERT and several ResNets on shared PCIe links",
        "testbed",
        _TESTBED_CAPTION,
        "With Figure 22: utilisation +9.5 to +14.8%; completion time of BERT −7 to −33%, of ResNet "
        "+1 to +3%.",
        partial(_testbed, 21),
    ),
    Plate(
        "figure22",
        22,
        "ResNet and a BERT of 8 to 24 GPUs on shared PCIe links",
        "testbed",
        _TESTBED_CAPTION,
        "With Figure 21: utilisation +9.5 to +14.8%; completion time of BERT −7 to −33%, of ResNet "
        "+1 to +3%.",
        partial(_testbed, 22),
    ),
    Plate(
        "figure23",
        23,
        "Schedulers on whole clusters",
        "saturated",
        _SATURATED_CAPTION,
        "Two-layer: Sincronia 0.39, TACCL* 0.49, CASSINI 0.48, Crux-PA 0.51, Crux-PS-PA and "
        "Crux-full 0.62. Double-sided: 0.43, 0.46, 0.45, 0.48, 0.51, 0.50.",
        saturated.draw_schedulers,
    ),
    Plate(
        "figure24",
        24,
        "Whose data the layers carry, and utilisation, over time",
        "trace",
        "Shaded: the share of each layer's capacity in use, by the GPU intensity of the job whose "
        "data it is, darker for higher; white is idle. Last row: GPU utilisation of the cluster.",
        "More dark for Crux-PA than for the baselines (26, 14 and 5% more utilisation than "
        "Sincronia, TACCL* and CASSINI on the first day), less white with path selection (+97% "
        "network utilisation).",
        trace.draw_over_time,
        ("trace_random",),
    ),
    Plate(
        "figure25",
        25,
        "Job schedulers alone and with Crux",
        "saturated",
        _SATURATED_CAPTION,
        "None 0.39 and 0.62 with Crux, Muri 0.59 and 0.73, HiveD 0.64 and 0.75.",
        saturated.draw_placements,
    ),
    Plate(
        "litegd9",
        9,
        "LiteGD: bandwidth of the chosen GPUs, by their number",
        "dispatch",
        "The bandwidth of a choice over that of the best choice, on clusters of all four kinds of "
        "hosts with links of 20 to 40 GB/s. Means over seeded clusters.",
        "LiteGD stays near 90%, topology-aware and default dispatching fall far below it.",
        dispatch.draw_by_gpus,
    ),
    Plate(
        "litegd10",
        10,
        "LiteGD: bandwidth of the chosen GPUs, by the links of hosts",
        "dispatch",
        "As above, mean over all numbers of GPUs.",
        "LiteGD's efficacy hardly depends on the links.",
        dispatch.draw_by_links,
    ),
    Plate(
        "cassini15",
        15,
        "CASSINI: the link of a snapshot",
        "cassini",
        "The snapshots of CASSINI's Table 2 on one link of 50 Gbit/s, three periods, under the "
        "middle one of the demands and periods that give the paper's score.",
        "Jobs with a high score hardly send at once; with a score of 0.6 they share the link most "
        "of the time.",
        cassini.draw_snapshots,
    ),
)


def draw_all(results: Path) -> tuple[list[Drawn], list[LeftOut]]:
    """Every figure for which ``results`` holds a file, and those for which it doesn't.

    Raises:
        ResultError: a file that is there can't be used: file, key, what was expected.
    """
    drawn: list[Drawn] = []
    left_out: list[LeftOut] = []
    for plate in PLATES:
        source = next(
            (file for name in plate.other if (file := results / f"{name}.json").exists()),
            results / f"{plate.benchmark}.json",
        )
        if not source.exists():
            left_out.append(LeftOut(plate, f"{source} is missing"))
            continue
        with matplotlib.rc_context(SETTINGS):
            figure = plate.draw(*read_rows(source))
        if figure is None:
            left_out.append(LeftOut(plate, f"{source} has no rows for it"))
        else:
            drawn.append(Drawn(plate, figure, source))
    return drawn, left_out
