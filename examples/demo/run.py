"""The demo: two jobs on one congested link, alone, together, and together under Crux."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from crux_torch.report.comparison import Comparison
from crux_torch.report.html import render
from examples.demo import netns, sockets, tables
from examples.demo.fabric import Fabric, FabricSpec
from examples.demo.job import TORCHRUN, Job, JobError, JobSpec, warm_up
from examples.demo.measurement import Measurement
from examples.demo.phases import Phase, Window, measure

CLUSTER = "demo"
STORE_PORT = 29410
ROUNDS = 3
RATE_MBIT = 200.0
TITLES = {"gpt": "GPT", "mlp": "MLP"}
SCRIPTS = {"gpt": "train_gpt.py", "mlp": "train_mlp.py"}
#: What an accelerator would take to compute one step of each, milliseconds.
ACCELERATOR_MS = {"gpt": 150, "mlp": 100}
#: The stock backend of each type of device, and what a machine has of it.
STOCK = {"cpu": "gloo", "cuda": "NCCL"}
SHARED = {"cpu": "Two cores", "cuda": "One GPU"}
#: Bounds on waiting, seconds: for ranks to start, for a phase, for a plan.
START_S, PHASE_S, PLAN_S = 120.0, 120.0, 120.0
#: Columns of the tables where the output is no terminal.
PIPE_WIDTH = 120


class DemoError(click.ClickException):
    """The demo could not show what it is for: what went wrong."""


class Demo:
    """The running demo: its network, its four jobs, and what was seen of them.

    Args:
        fabric: the network, None for loopback.
        folder: for logs and what the jobs print.
        real_compute: whether layers take just the time that this machine needs.
        device: type of device that the jobs train on; ``cuda``: all ranks share one GPU.
        say: called with what is going on now, and the share of it that is done.
    """

    def __init__(
        self,
        fabric: Fabric | None,
        folder: Path,
        real_compute: bool,
        device: str,
        say: Callable[[str, float], None],
    ) -> None:
        self.seen = Measurement()
        self._fabric = fabric
        self._hosts = [fabric.host(0, 0), fabric.host(1, 0)] if fabric else []
        self._say = say
        address = self._hosts[0].address if self._hosts else "127.0.0.1"
        self._store = f"tcp://{address}:{STORE_PORT}"
        self._watch: subprocess.Popen[str] | None = None
        self.jobs: dict[str, Job] = {}
        self._folder = folder
        self._real_compute = real_compute
        self._device = device
        (folder / "topology.yaml").unlink(missing_ok=True)

    def start(self) -> None:
        """Start each job twice, with the stock backend and under Crux, and let them warm up."""
        port = 29501
        for kind in ("stock", "crux"):
            for name in TITLES:
                self.jobs[f"{name}-{kind}"] = self._launch(name, kind, port)
                port += 1
        warm_up(
            self.jobs,
            START_S,
            lambda left: self._say("starting the ranks", 1 - left / len(self.jobs)),
        )
        self._watch = self._start_watch()

    def profile(self) -> None:
        """Let both jobs run under Crux until there is a plan for them."""
        for name in TITLES:
            self.jobs[f"{name}-stock"].pause()
            self.jobs[f"{name}-crux"].resume()
        start = time.monotonic()
        while not self._planned():
            waited = time.monotonic() - start
            states = {job["job"]: job["state"] for job in self.seen.status.get("jobs", ())}
            line = ", ".join(f"{name} {state}" for name, state in sorted(states.items()))
            self._say(f"Crux measures the jobs ({line or 'no record yet'})", min(0.95, waited / 40))
            for job in self.jobs.values():
                job.check()
            if waited > PLAN_S:
                tail = self.jobs["gpt-crux"].tail()
                raise DemoError(f"no plan for both jobs after {PLAN_S:.0f} s\n{tail}")
            time.sleep(0.2)

    def compare(self, steps: int) -> None:
        """Measure every case, in short turns, so that a machine's moods meet all of them."""
        each = math.ceil(steps / ROUNDS)
        for turn in range(ROUNDS):
            last = turn == ROUNDS - 1
            for name, title in TITLES.items():
                window = self._phase(f"{title} alone", (f"{name}-stock",), each)
                self.seen.alone.setdefault(name, []).append(window)
            stock, crux = (tuple(f"{n}-{kind}" for n in TITLES) for kind in ("stock", "crux"))
            self.seen.together.append(self._phase("together", stock, each, "together", last))
            window = self._phase("together, Crux", crux, each, "with_crux", last)
            self.seen.with_crux.append(window)
        for name in TITLES:
            self.seen.dscp[name] = self._dscp(self.jobs[f"{name}-crux"])
        # The records go when the jobs end.
        self._stop_watch()

    def finish(self) -> None:
        """Let the jobs end by themselves and keep their steps.

        Raises:
            DemoError: one did not end well.
        """
        self._say("ending the jobs", 0.0)
        for job in self.jobs.values():
            job.finish()
        for key, job in self.jobs.items():
            codes = job.wait(30.0)
            if codes != [0] * len(codes):
                raise DemoError(f"{key} ended with {codes}\n{job.tail()}")
            name, kind = key.split("-")
            {"stock": self.seen.stock, "crux": self.seen.crux}[kind][name] = job.steps()

    def close(self) -> None:
        """End whatever still runs."""
        for job in self.jobs.values():
            job.kill()
        self._stop_watch()

    def _stop_watch(self) -> None:
        if self._watch:
            self._watch.kill()
            self._watch.wait()
            self._watch = None

    def _launch(self, name: str, kind: str, port: int) -> Job:
        arguments = ["--steps", "1000000"]
        if not self._real_compute:
            arguments += ["--accelerator-ms", str(ACCELERATOR_MS[name])]
        spec = JobSpec(
            f"{name}-{kind}", TITLES[name], SCRIPTS[name], tuple(arguments), port, self._device
        )
        launcher = list(TORCHRUN)
        if kind == "crux":
            launcher = [sys.executable, "-m", "cruxrun", "--crux-job", name]
            launcher += ["--crux-store", self._store, "--crux-cluster", CLUSTER]
            if self._fabric:
                launcher += ["--crux-topology", str(self._topology_file())]
        return Job(spec, self._folder, launcher, self._fabric, self._hosts)

    def _topology_file(self) -> Path:
        """What the operator of this network would tell Crux of it."""
        path = self._folder / "topology.yaml"
        if self._fabric and not path.exists():
            path.write_text(self._fabric.topology_yaml())
        return path

    def _phase(
        self, title: str, running: tuple[str, ...], steps: int, case: str = "", sample: bool = False
    ) -> Window:
        def tick() -> None:
            done = min(
                sum(s.start >= start for s in self.jobs[key].steps()) / (steps + 2)
                for key in running
            )
            self._say(title, min(1.0, done))

        start = time.monotonic()
        before = self._counters()
        with ExitStack() as stack:
            if sample:
                watched = {key.split("-")[0]: self.jobs[key].workers()[:1] for key in running}
                sampler = stack.enter_context(sockets.Sampler(watched))
            window = measure(Phase(case or title, running), self.jobs, steps, PHASE_S, tick)
        if sample:
            self.seen.sent[case] = sampler.samples
        if case and before:
            self._add_counters(case, before)
        return window

    def _counters(self) -> dict[str, dict[int, int]]:
        return {c.link: c.bytes for c in self._fabric.counters()} if self._fabric else {}

    def _add_counters(self, case: str, before: dict[str, dict[int, int]]) -> None:
        shared = "leaf0->spine0"
        total = self.seen.links.setdefault(case, {}).setdefault(shared, {})
        for level, sent in self._counters()[shared].items():
            total[level] = total.get(level, 0) + sent - before[shared][level]

    def _dscp(self, job: Job) -> int:
        """DSCP of the connection over which rank 0 has sent most: the gradients'."""
        opened = sockets.connections(job.workers()[0])
        try:
            return sockets.dscp(max(opened, key=sockets.bytes_acked))
        finally:
            for each in opened:
                each.close()

    def _planned(self) -> bool:
        jobs = self.seen.status.get("jobs", ())
        plan = self.seen.status.get("plan") or {}
        planned = {entry["job"] for entry in plan.get("entries", ())}
        return planned >= set(TITLES) and all(job["state"] == "running" for job in jobs)

    def _start_watch(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "examples.demo.watch", self._store, CLUSTER]
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
            "cwd": Path(__file__).parents[2],
        }
        if self._fabric:
            watch = self._fabric.popen(self._hosts[0], argv, **options)
        else:
            watch = subprocess.Popen(argv, start_new_session=True, **options)

        def read() -> None:
            for line in watch.stdout or ():
                self.seen.status = json.loads(line)

        threading.Thread(target=read, name="watch", daemon=True).start()
        return watch


def describe(
    seen: Measurement, fabric: Fabric | None, real_compute: bool, device: str = "cpu"
) -> Comparison:
    """The report's contents."""
    stock, shared = STOCK[device], SHARED[device]
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
        links=seen.link_rows(),
    )


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
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
    type=click.Choice(sorted(STOCK)),
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
    steps: int,
    real_compute: bool,
    device: str,
    loopback: bool,
    json_path: Path | None,
    out: Path,
) -> None:
    """Train two models on one congested link: alone, together, and together under Crux."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    if device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch finds no GPU here")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    out = out.absolute()
    with ExitStack() as stack:
        fabric = None if loopback else _fabric(stack, console)
        say = stack.enter_context(_progress(console))
        demo = Demo(fabric, out, real_compute, device, say)
        stack.callback(demo.close)
        try:
            demo.start()
            demo.profile()
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
            netns.enter_user_namespace([sys.executable, "-m", "examples.demo", *sys.argv[1:]])
    if not possible:
        console.print(f"No network of namespaces here ({reason}): using the loopback, unshaped.")
        return None
    return stack.enter_context(Fabric(FabricSpec(hosts_per_leaf=1, rate_mbit=RATE_MBIT)))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
