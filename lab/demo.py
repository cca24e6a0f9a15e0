"""The demo: two jobs on one congested link, alone, together, and together under Crux."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec
import torch
from matplotlib.figure import FigureBase
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from crux_torch.report.page import report
from crux_torch.report.page.charts import COLOURS, Chart, Lane, Span, panels, timeline
from lab import netns, sockets, tables
from lab.comparison import CaseTimeline, Comparison, Interval
from lab.fabric import Fabric, FabricSpec
from lab.job import JobError, Step
from lab.measurement import Measurement
from lab.phases import Window
from lab.tables import sheets, spread_ms
from lab.twins import CRUX, STOCK, Say, Twins, Workload

ROUNDS = 3
RATE_MBIT = 200.0
SHARED_LINK = "leaf0->spine0"
TITLES = {"gpt": "GPT", "mlp": "MLP"}
#: What an accelerator would take to compute one step of each, milliseconds.
ACCELERATOR_MS = {"gpt": 150, "mlp": 100}
#: The stock backend of each type of device, and what a machine has of it.
BACKENDS = {"cpu": "gloo", "cuda": "NCCL"}
HARDWARE = {"cpu": "Two cores", "cuda": "One GPU"}
#: Columns of the tables where the output is no terminal.
PIPE_WIDTH = 120


class DemoError(click.ClickException):
    """The demo could not show what it is for: what went wrong."""


class Demo(Twins):
    """The running demo: its network, its four jobs, and what was seen of them.

    Args:
        fabric: the network, None for loopback.
        folder: for logs and for what the jobs print.
        real_compute: whether layers take just the time that this machine needs.
        device: type of device that the jobs train on; ``cuda``: all ranks share one GPU.
        say: called with what is going on.
    """

    def __init__(
        self, fabric: Fabric | None, folder: Path, real_compute: bool, device: str, say: Say
    ) -> None:
        pace = {name: ("--accelerator-ms", str(ms)) for name, ms in ACCELERATOR_MS.items()}
        workloads = [
            Workload(name, name, () if real_compute else pace[name], device) for name in TITLES
        ]
        ends = (fabric.host(0, 0), fabric.host(1, 0)) if fabric else ()
        super().__init__(
            workloads, fabric, dict.fromkeys(TITLES, ends), folder, say, cluster="demo",
            topology=None,
        )  # fmt: skip
        self.seen = Measurement()
        self._network = fabric

    def compare(self, steps: int) -> None:
        """Measures every case in short turns, so that a disturbance of the machine meets all."""
        each = math.ceil(steps / ROUNDS)
        for turn in range(ROUNDS):
            for name, title in TITLES.items():
                window = self.measure(f"{title} alone", STOCK, (name,), each)
                self.seen.alone.setdefault(name, []).append(window)
            last = turn == ROUNDS - 1
            self.seen.together.append(self._together("together", STOCK, each, last))
            self.seen.with_crux.append(self._together("with_crux", CRUX, each, last))
        for name in TITLES:
            with sockets.busiest(self.jobs[f"{name}-crux"].workers()[0]) as connection:
                self.seen.dscp[name] = sockets.dscp(connection)

    def finish(self) -> dict[str, dict[str, list[Step]]]:
        self.seen.status = self.status
        steps = super().finish()
        self.seen.stock, self.seen.crux = steps[STOCK], steps[CRUX]
        return steps

    def _together(self, case: str, run: str, steps: int, sample: bool) -> Window:
        """Both jobs run at the same time; samples their connections and counts the link's bytes."""
        before = self._sent()
        with ExitStack() as stack:
            if sample:
                watched = {name: self.jobs[f"{name}-{run}"].workers()[:1] for name in TITLES}
                sampler = stack.enter_context(sockets.Sampler(watched))
                self.seen.sent[case] = sampler.samples
            window = self.measure(
                "together" if run == STOCK else "together, Crux", run, self.names, steps
            )
        total = self.seen.links.setdefault(case, {}).setdefault(SHARED_LINK, {})
        for level, sent in self._sent().items():
            total[level] = total.get(level, 0) + sent - before[level]
        return window

    def _sent(self) -> dict[int, int]:
        """Bytes that the shared link has sent, by level; nothing on the loopback."""
        links = self._network.counters() if self._network else ()
        return next((link.bytes for link in links if link.link == SHARED_LINK), {})


def describe(
    seen: Measurement, fabric: Fabric | None, real_compute: bool, device: str = "cpu"
) -> Comparison:
    """The report's contents."""
    stock, shared = BACKENDS[device], HARDWARE[device]
    rate = fabric.spec.rate_mbit if fabric else None
    setting = [
        f"Each job has two ranks on two hosts below different leaves; the jobs share a leaf-spine "
        f"link of {rate:g} Mbit/s, built from network namespaces on one machine."
        if rate
        else "Both jobs run over this machine's loopback, which is not shaped and has no "
        "priorities: no gain can show here.",
        f"Each job's steps are timed under torchrun with stock {stock}, alone and together, and "
        "under cruxrun, together; the turns are interleaved.",
    ]
    notes = []
    if not real_compute:
        times = ", ".join(f"{TITLES[n]} {ms} ms" for n, ms in ACCELERATOR_MS.items())
        notes.append(
            f"The models, data, gradients and network traffic are real. {shared} can't stand in "
            "for four accelerators, so each layer also waits until an accelerator would be done "
            f"with it (a step's computation: {times}); --real-compute turns that off."
        )
    if device == "cuda":
        notes.append(
            f"All ranks share one {torch.cuda.get_device_name()} by time slices, and NCCL "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))} sends over TCP, by one channel."
        )
    return Comparison(
        title="Two training jobs on one link, without and with Crux",
        setting=tuple(setting),
        notes=tuple(notes),
        capacity_Bps=rate * 1e6 / 8 if rate else None,
        baseline="alone",
        cases=seen.cases(),
        jobs=seen.job_rows(TITLES),
        step_times=seen.step_times(),
        timelines=seen.timelines(),
        links=seen.link_rows() if fabric else (),
    )


@contextmanager
def _progress(console: Console) -> Iterator[Say]:
    if not console.is_terminal:
        said = [""]

        def line(text: str, share: float) -> None:
            if text != said[0]:
                said[0] = text
                console.print(text)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, share: progress.update(task, description=text, completed=share)


@click.command()
@click.option(
    "--steps", default=30, show_default=True, help="Steps of each job in each case, at least."
)
@click.option("--real-compute", is_flag=True, help="Don't wait as an accelerator would.")
@click.option(
    "--device",
    type=click.Choice(sorted(BACKENDS)),
    default="cpu",
    show_default=True,
    help="Train over gloo on the CPU, or over NCCL with all ranks on the first GPU.",
)
@click.option("--loopback", is_flag=True, help="Don't build a network, use the loopback.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the results here."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/demo"),
    show_default=True,
    help="Folder for the report and the jobs' logs.",
)
def main(
    steps: int, real_compute: bool, device: str, loopback: bool, json_path: Path | None, out: Path
) -> None:
    """Train two models on one congested link: alone, together, and together under Crux."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    if device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch finds no GPU here")
    netns.interrupt_on_signals()
    out = out.absolute()
    with ExitStack() as stack:
        fabric = None if loopback else _fabric(stack, console)
        say = stack.enter_context(_progress(console))
        demo = Demo(fabric, out, real_compute, device, say)
        stack.callback(demo.close)
        try:
            demo.start()
            demo.plan()
            demo.compare(steps)
            demo.finish()
        except JobError as error:
            raise DemoError(str(error)) from error
        except KeyboardInterrupt:
            raise click.Abort from None
    comparison = describe(demo.seen, fabric, real_compute, device)
    tables.show(console, comparison)
    report = out / "report.html"
    report.write_text(render(comparison))
    console.print(f"\nReport: {report}")
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")


def _fabric(stack: ExitStack, console: Console) -> Fabric | None:
    """The network; None, and why, where this machine does not permit one."""
    possible, reason = netns.available()
    if not possible and netns.USER_NAMESPACE_ENV not in os.environ:
        could, _ = netns.user_namespace_available()
        if could:
            netns.enter_user_namespace([sys.executable, "-m", "lab", *sys.argv[1:]])
    if not possible:
        console.print(f"No network of namespaces here ({reason}): using the loopback, unshaped.")
        return None
    return stack.enter_context(Fabric(FabricSpec(hosts_per_leaf=1, rate_mbit=RATE_MBIT)))


def render(comparison: Comparison) -> str:
    """The page; the same comparison gives the same page."""
    charts = [_utilisation(comparison)]
    if comparison.step_times:
        charts.append(_step_times(comparison))
    charts += [_timeline(comparison, timeline) for timeline in comparison.timelines]
    return report(
        comparison.title,
        sheets(comparison),
        charts,
        setting=comparison.setting,
        notes=comparison.notes,
    )


def _utilisation(comparison: Comparison) -> Chart:
    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        for y, case in enumerate(comparison.cases):
            share = 100 * (case.utilisation or 0.0)
            axes.barh(y, share, 0.6, color="0.4")
            axes.text(share + 1, y, f"{share:.1f}%" if case.utilisation else "–", va="center")
        axes.set_yticks(range(len(comparison.cases)), [case.title for case in comparison.cases])
        axes.set(xlim=(0, 100), xlabel="%")
        axes.invert_yaxis()

    caption = (
        "The share of their time in which the cluster's devices computed. A step counts with the "
        "compute time that it takes when its job is alone."
    )
    return Chart("Utilisation", caption, 0.45 * len(comparison.cases) + 0.7, draw)


def _step_times(comparison: Comparison) -> Chart:
    jobs = [job for job in comparison.jobs if any(s.job == job.name for s in comparison.step_times)]

    def draw(figure: FigureBase) -> None:
        for number, (axes, job) in enumerate(zip(panels(figure, len(jobs)), jobs, strict=True)):
            for y, case in enumerate(comparison.cases):
                values = comparison.times(job.name, case.key)
                if not values:
                    continue
                # The golden ratio spreads the dots evenly, the same way each time.
                spread = [y + 0.5 * ((i * 0.618034) % 1.0 - 0.5) for i in range(len(values))]
                colour = COLOURS[number % len(COLOURS)]
                axes.plot([1e3 * v for v in values], spread, ".", alpha=0.4, color=colour)
                low, median, high = spread_ms(values)
                axes.hlines(y, low, high, color="black")
                axes.vlines(median, y - 0.35, y + 0.35, color="black", linewidth=2)
            axes.set_yticks(range(len(comparison.cases)), [c.title for c in comparison.cases])
            axes.set(title=job.title, xlim=(0, None), xlabel="ms")
            axes.invert_yaxis()

    caption = "Each dot is one step, the tick the median, and the line the middle 80%."
    return Chart("Every step", caption, 1.6 * len(jobs) + 0.4, draw)


def _timeline(comparison: Comparison, seen: CaseTimeline) -> Chart:
    titles = {job.name: job.title for job in comparison.jobs}
    rates = [rate for lane in seen.lanes for _, rate in lane.rate_Bps]
    top = max([*rates, comparison.capacity_Bps or 0.0]) or 1.0
    lanes = [
        Lane(
            titles.get(lane.job, lane.job),
            _spans(lane.computing),
            _spans(lane.waiting),
            [(at_s, rate / top) for at_s, rate in lane.rate_Bps],
        )
        for lane in seen.lanes
    ]
    title = f"Timeline: {comparison.case_title(seen.case)}"
    about = "what its connections sent, on the same scale for all jobs"
    return timeline(title, lanes, (0, seen.length_s), about)


def _spans(intervals: tuple[Interval, ...]) -> list[Span]:
    return [(i.start, i.end) for i in intervals]
