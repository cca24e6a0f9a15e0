"""The screen of ``crux top``. It paints the visible lines only, however many jobs there are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from crux_torch import _fluid
from crux_torch.agreement.audit import AuditEntry
from crux_torch.errors import CruxError
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import LEGEND, ClusterReader, ClusterStatus
from crux_torch.report.explain_text import sections
from crux_torch.report.explanation import explain, near_as_alone
from crux_torch.report.live_cluster import LinkLoad
from crux_torch.report.top_rows import (
    JOB_COLUMNS,
    LINK_COLUMNS,
    Row,
    TopView,
    loads_of,
    ordered,
    top_view,
)
from crux_torch.schedule.model import Link
from crux_torch.sim.advice import by_level
from crux_torch.sim.course import Watch, change
from crux_torch.sim.play import play
from crux_torch.words import safe, seconds

#: Steps of the job that are shown, and that are played before these.
STEPS, BEFORE = 3, 40
#: Letters of a job's name, and jobs.
NAME, JOBS = 12, 8
TIMELINE_LEGEND = "# computes   + computes and sends   = sends   - sends slowly   . waits"
#: Share of the rate that it has alone from which a job sends, and from which not slowly.
SENDS, FAST = 0.02, 0.5


def timeline_lines(
    status: ClusterStatus,
    topology: Topology | None,
    job: str,
    step_s: float,
    others: Sequence[str],
    width: int = 80,
) -> Iterator[str]:
    """Yields a heading, a line for each job, and a legend.

    Args:
        step_s: of ``job``, as played.
        others: jobs that are shown below it, the first ones if they are many.
        width: of a line, in letters.

    Raises:
        SpecError: a job or link that can't be simulated.
        ScenarioError: the clock can't resolve the shortest iteration at the end.
    """
    live, factors = near_as_alone(status, topology, job)
    cells = max(10, width - NAME - 1)
    horizon_s = (BEFORE + STEPS) * step_s
    watch = Watch(np.linspace(BEFORE * step_s, horizon_s, cells + 1).tolist())
    play(by_level(live.taken, live.now, factors), live.now, horizon_s, watch=watch)
    course = watch.course()
    yield f"Who computes and sends when, as played, in {seconds(STEPS * step_s)}"
    for name in (job, *others[: JOBS - 1]):
        computes = change(course.compute_s[name], course.time_s) > 0.5
        rates = change(course.comm_s[name], course.time_s)
        marks = map(_mark, computes.tolist(), rates.tolist())
        yield f"{set_cell_size(safe(name), NAME)} {''.join(marks)}"
    yield TIMELINE_LEGEND


def _mark(computes: bool, rate: float) -> str:
    if computes:
        return "+" if rate >= SENDS else "#"
    if rate < SENDS:
        return "."
    return "=" if rate >= FAST else "-"


_HEADING, _CURSOR = Style(bold=True, underline=True), Style(reverse=True)
_SLOW = Style(color="yellow", bold=True)
#: A job whose step takes so many times as long as alone is shown as a slow one.
SLOW = 1.25


class Rows(ScrollView, can_focus=True):
    """A table of which only the visible lines are painted.

    Args:
        columns: headings and widths.
        first: the column that it is sorted by.
        name: of the widget.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "choose", "Detail"),
    ]

    class Chosen(Message):
        """The row that the user asks about."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, columns: Mapping[str, int], first: str, name: str) -> None:
        super().__init__(id=name)
        self.columns, self.column, self.backwards = columns, first, False
        self.filtered = ""
        self._all: Sequence[Row] = ()
        self.shown: list[Row] = []
        #: The row with the cursor, and its place: it stays on its row.
        self._chosen, self.cursor = "", 0
        self._width = sum(columns.values()) + 2 * len(columns)

    def take(self, rows: Sequence[Row]) -> None:
        """Show these rows, when the table is shown."""
        self._all = rows
        if self.display:
            self.sort_again()

    def sort_again(self) -> None:
        """Sort and filter again."""
        self.shown = ordered(self._all, self.column, self.backwards, self.filtered)
        places = (i for i, row in enumerate(self.shown) if row.name == self._chosen)
        self.cursor = next(places, 0)
        self.virtual_size = Size(self._width, len(self.shown) + 1)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Returns line ``y`` of the window: the headings, then rows from where it is scrolled."""
        left, top = self.scroll_offset
        at = top + y - 1
        if y == 0:
            mark = "+" if self.backwards else "-"
            cells = [f"{name}{mark}" if name == self.column else name for name in self.columns]
            style = _HEADING
        elif at < len(self.shown):
            row = self.shown[at]
            cells = [row.cells[name] for name in self.columns]
            slow = row.keys.get("slowdown", (1, 0.0, ""))
            style = _SLOW if slow[0] == 0 and -slow[1] >= SLOW else Style()
            if at == self.cursor:
                style += _CURSOR
        else:
            return Strip.blank(self.size.width, Style.null())
        text = "  ".join(
            set_cell_size(cell, width)
            for cell, width in zip(cells, self.columns.values(), strict=True)
        )
        return Strip([Segment(text, style)]).crop_extend(left, left + self.size.width, style)

    def action_move(self, by: int) -> None:
        """Move the cursor by so many rows."""
        if self.shown:
            at = min(max(0, self.cursor + by), len(self.shown) - 1)
            self._chosen, self.cursor = self.shown[at].name, at
            top, height = self.scroll_offset.y, self.scrollable_content_region.height - 1
            if not top <= at < top + height:
                self.scroll_to(y=at if at < top else at - height + 1, animate=False)
            self.refresh()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 2))

    def action_choose(self) -> None:
        """Ask for the detail of the row with the cursor."""
        if self.shown:
            self.post_message(self.Chosen(self.shown[self.cursor].name))


class Detail(ModalScreen[None]):
    """All that is known of one job, or of one link."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self._lines = list(lines)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("\n".join(self._lines), markup=False, id="text")
        yield Footer()

    def add(self, lines: Sequence[str]) -> None:
        """Put more lines below."""
        self._lines += lines
        self.query_one("#text", Static).update("\n".join(self._lines))


class TopApp(App[None]):
    """Jobs, links and plan of a cluster, read again and again.

    Args:
        reader: of the cluster; used by one thread at a time.
        every_s: seconds between two readings.
    """

    CSS = """
    #head { height: auto; } #filter { display: none; } #links { display: none; }
    Rows { height: 1fr; scrollbar-size: 0 1; } VerticalScroll { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("l", "links", "Jobs/links"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
    ]

    def __init__(self, reader: ClusterReader, every_s: float = 2.0) -> None:
        super().__init__()
        self._reader, self._every_s = reader, every_s
        self._seen: tuple[ClusterStatus, TopView, tuple[AuditEntry, ...]] | None = None
        self._loads: tuple[object, dict[Link, LinkLoad]] = (None, {})

    def compose(self) -> ComposeResult:
        yield Static("reading the store ...", markup=False, id="head")
        yield Rows(JOB_COLUMNS, "slowdown", "jobs")
        yield Rows(LINK_COLUMNS, "planned", "links")
        yield Input(placeholder="text in a row; Enter ends, empty shows all", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Read, and again after a while."""
        self.query_one("#jobs").focus()
        self.look()
        self.set_interval(self._every_s, self.look)

    @work(thread=True, exclusive=True, group="look")
    def look(self) -> None:
        """Read the store in a thread, and show what is there."""
        try:
            status = self._reader.read()
            audit = self._reader.audit()
        except CruxError as error:
            self.call_from_thread(self._say, f"can't read the store: {safe(error)}")
            return
        topology = self._reader.topology
        key = (status.jobs, status.plan, topology, status.operator, status.steps)
        if key != self._loads[0]:
            self._loads = key, loads_of(status, topology)
        view = top_view(status, topology, audit, time.time(), loads=self._loads[1])
        self.call_from_thread(self.show, status, view, audit)

    def show(self, status: ClusterStatus, view: TopView, audit: tuple[AuditEntry, ...]) -> None:
        """Show a view."""
        self._seen = status, view, audit
        self._say("\n".join((*view.head, *([f"why: {view.why}"] if view.why else ()))))
        self.query_one("#jobs", Rows).take(view.jobs)
        self.query_one("#links", Rows).take(view.links)

    def _say(self, text: str) -> None:
        width = max(20, self.size.width)
        lines = [set_cell_size(line, width).rstrip() for line in text.split("\n")]
        self.query_one("#head", Static).update("\n".join(lines))

    def on_resize(self, _: Resize) -> None:
        """Cut the head to the new width."""
        if self._seen is not None:
            self.show(*self._seen)

    @property
    def _table(self) -> Rows:
        jobs = self.query_one("#jobs", Rows)
        return jobs if jobs.display else self.query_one("#links", Rows)

    def action_links(self) -> None:
        """Show the links instead of the jobs, or the other way round."""
        jobs, links = self.query_one("#jobs", Rows), self.query_one("#links", Rows)
        jobs.display, links.display = not jobs.display, jobs.display
        self._table.sort_again()
        self._table.focus()

    def action_sort(self, by: int) -> None:
        """Sort by the next column, or the one before."""
        table = self._table
        names = list(table.columns)
        table.column = names[(names.index(table.column) + by) % len(names)]
        table.sort_again()

    def action_reverse(self) -> None:
        self._table.backwards = not self._table.backwards
        self._table.sort_again()

    def action_filter(self) -> None:
        """Ask for the text that rows must have."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._table.filtered = event.value
        self._table.sort_again()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Go back to the table."""
        self.query_one("#filter", Input).display = False
        self._table.focus()

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """Show the detail of a row; a job is explained beside."""
        row = next(row for row in self._table.shown if row.name == event.name)
        lines = [f"{name + ':':12}{cell}" for name, cell in row.cells.items() if cell]
        if self._table.id == "links":
            self.push_screen(Detail(lines))
            return
        lines = [
            f"{name + ':':12}{cell}" + (f"  ({LEGEND[name]})" if name in LEGEND else "")
            for name, cell in row.cells.items()
            if cell
        ]
        detail = Detail(lines)
        self.push_screen(detail)
        self.explain(event.name, detail)

    @work(thread=True, group="explain", exclusive=True)
    def explain(self, job: str, detail: Detail) -> None:
        """Explain a job in a thread, below its figures."""
        assert self._seen is not None
        status, _, audit = self._seen
        try:
            found = explain(status, self._reader.topology, audit, job)
        except (CruxError, StopIteration, _fluid.SpecError) as error:
            lines = ["", f"it can't be explained: {safe(error)}"]
        else:
            lines = [
                line
                for heading, told in sections(found, time.time())
                for line in ("", heading, *(f"  {each}" for each in told))
            ]
            if found.played_s:
                others = [rival.job for rival in found.rivals]
                played = status, self._reader.topology, job, found.played_s, others
                lines += ["", *timeline_lines(*played, self.size.width - 2)]
        self.call_from_thread(detail.add, lines)
