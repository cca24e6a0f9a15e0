"""``crux top``: its screen at 80 by 24, driven by keys; its tables, and its JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import heavy3
import msgspec
import pytest
from click.testing import CliRunner, Result
from places import SUPPORT
from textual.pilot import Pilot

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.records import PathCounts
from crux_torch.cli.main import main
from crux_torch.errors import StoreError
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.top_app import Rows, TopApp
from crux_torch.report.top_rows import top_view

#: Each key waits until the screen is idle, which takes time on a busy machine.
pytestmark = pytest.mark.slow

#: The screen as it was looked at. Without the file, the test writes it.
SNAPSHOT = SUPPORT / "top_80x24.txt"
NOW_S = 1_800_000_000.0
Drive = Callable[["Screen"], Awaitable[None]]


class Reader:
    """Stands for the store that the screen reads."""

    def __init__(self, status: ClusterStatus) -> None:
        self.status, self.topology = status, heavy3.topology()
        self.error: StoreError | None = None

    def read(self) -> ClusterStatus:
        if self.error is not None:
            raise self.error
        return self.status

    def audit(self) -> tuple[AuditEntry, ...]:
        return (
            AuditEntry(
                kind="plan", at_s=NOW_S - 300, who="A", before=2, after=3, why=("C started",),
                changes=("A: level default -> 6",),
            ),
        )  # fmt: skip


class Screen:
    """The app under test."""

    def __init__(self, app: TopApp, pilot: Pilot[None], reader: Reader) -> None:
        self.app, self.pilot, self.reader = app, pilot, reader

    async def text(self) -> str:
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()
        # The footer asks for its keys after it was shown, which a busy machine does late.
        while any(not footer.children for footer in self.app.screen.query("Footer")):
            await self.pilot.pause()
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips) + "\n"

    async def press(self, *keys: str) -> str:
        await self.pilot.press(*keys)
        return await self.text()

    def jobs(self) -> list[str]:
        return [row.name for row in self.app.query_one("#jobs", Rows).shown]


def reader_of(count: int = 4) -> Reader:
    """heavy-3's jobs on one spine; more of them than there are, renamed."""
    records = heavy3.measured()
    plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), records)
    status = heavy3.status_of(records, plan, {"A": 0.70, "B": 0.77, "C": 0.84, "D": 0.29})
    jobs = [
        msgspec.structs.replace(record, paths=PathCounts(as_planned=3, elsewhere=1))
        if record.job == "B"
        else record
        for record in records
    ]
    jobs += [
        msgspec.structs.replace(records[n % 4], job=f"more-{n:03}", profile=None, state="starting")
        for n in range(count - 4)
    ]
    return Reader(replace(status, jobs=tuple(jobs)))


def drive(steps: Drive, reader: Reader | None = None, size: tuple[int, int] = (80, 24)) -> None:
    reader = reader or reader_of()

    async def run() -> None:
        app = TopApp(reader, every_s=3600.0)  # type: ignore[arg-type]
        async with app.run_test(size=size) as pilot:
            await steps(Screen(app, pilot, reader))

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("crux_torch.report.top_app.time.time", lambda: NOW_S)


def test_the_screen_at_80_by_24_is_as_it_was_looked_at() -> None:
    async def steps(screen: Screen) -> None:
        text = await screen.text()
        lines = text.split("\n")[:24]
        assert max(map(len, lines)) <= 80
        if not SNAPSHOT.exists():
            SNAPSHOT.write_text(text)
        assert text == SNAPSHOT.read_text()

    drive(steps)


def test_keys_sort_reverse_and_filter() -> None:
    async def steps(screen: Screen) -> None:
        await screen.text()
        assert screen.jobs() == ["C", "B", "A", "D"]  # by slowdown
        await screen.press("r")
        assert screen.jobs() == ["D", "A", "B", "C"]
        table = screen.app.query_one("#jobs", Rows)
        while table.column != "job":
            await screen.press("s")
        assert screen.jobs() == ["D", "C", "B", "A"]
        assert "job+" in await screen.press("r", "r")
        await screen.press("S")
        assert table.column == list(table.columns)[-1]
        await screen.press("slash", "a", "s", "t", "r", "a", "y", "enter")
        assert screen.jobs() == ["B"]
        assert screen.app.focused is table

    drive(steps)


def test_the_links_and_who_is_on_them() -> None:
    async def steps(screen: Screen) -> None:
        text = await screen.press("l")
        assert "leaf0->spine1" in text
        assert "185%" in text
        assert "C, D, B +1" in text
        assert "leaf0->spine0" not in text
        assert "A  " in await screen.press("l")

    drive(steps)


def test_the_detail_of_a_job_explains_it() -> None:
    async def steps(screen: Screen) -> None:
        await screen.text()
        text = await screen.press("down", "enter")
        assert "job:        B" in text
        detail = str(screen.app.screen.query_one("#text").render())
        assert "Who is in the way" in detail
        assert "C, on leaf0->spine1" in detail
        lines = detail.split("\n")
        heading = next(n for n, line in enumerate(lines) if line.startswith("Who computes and"))
        own = lines[heading + 1]
        assert re.fullmatch(r"B {12}[-#+=.]{65}", own), "78 letters: the window has 80"
        assert "job:        B" not in await screen.press("escape")

    drive(steps)


def test_the_cursor_stays_on_its_job_when_the_order_changes_and_scrolls() -> None:
    async def steps(screen: Screen) -> None:
        await screen.text()
        table = screen.app.query_one("#jobs", Rows)
        await screen.press("down", "down")
        assert table.shown[table.cursor].name == "A"
        await screen.press("r")
        assert table.shown[table.cursor].name == "A"
        text = await screen.press("end")
        assert table.cursor == len(table.shown) - 1 == 99
        assert table.shown[-1].name in text
        assert "slowdown" in text  # the headings stay
        assert "more-000" not in await screen.press("pageup")
        assert table.shown[0].name in await screen.press("home")

    drive(steps, reader_of(100))


def test_a_store_that_is_away_is_said_and_the_screen_stays() -> None:
    async def steps(screen: Screen) -> None:
        await screen.text()
        screen.reader.error = StoreError("it does not answer\x1b[2J")
        screen.app.look()
        text = await screen.text()
        assert "can't read the store: it does not answer" in text
        assert "\x1b" not in text
        assert screen.jobs() == ["C", "B", "A", "D"]

    drive(steps)


@pytest.mark.parametrize("size", [(20, 5), (300, 60)])
def test_any_size_of_terminal_is_painted(size: tuple[int, int]) -> None:
    async def steps(screen: Screen) -> None:
        lines = (await screen.text()).split("\n")
        assert max(map(len, lines)) <= size[0]
        if size[0] == 300:
            assert "h0-0,h1-0" in "".join(lines)

    drive(steps, size=size)


def test_without_a_plan_a_topology_or_jobs_there_is_a_view() -> None:
    status = reader_of().status
    view = top_view(replace(status, plan=None, jobs=(), steps={}), None, (), NOW_S)
    assert view.head == ("cluster lab: 0 jobs", "no plan")
    assert (view.jobs, view.links) == ((), ())
    view = top_view(replace(status, plan_renewed=False), None, (), NOW_S)
    assert view.head[1] == "plan 3 by A, policy taccl, NOT renewed"


def crux(endpoint: str, *argv: str, **env: str) -> Result:
    env = {"CRUX_STORE": endpoint, "CRUX_CLUSTER": "lab", **env}
    return CliRunner(env=env).invoke(main, ["top", *argv])


def test_once_prints_tables_and_json_has_links_and_reasons(endpoint: str) -> None:
    text = crux(endpoint, "--once", COLUMNS="80").output
    assert max(map(len, text.splitlines())) <= 80
    assert "why: C started" in text
    for cell in ("840 ms", "leaf0->spine1", "185%"):
        assert cell in text
    found = json.loads(crux(endpoint, "--json").output)
    assert found["why"] == "C started"
    assert set(found["links"]["leaf0->spine1"]["jobs"]) == {"A", "B", "C", "D"}
    assert {job["job"] for job in found["jobs"]} == {"A", "B", "C", "D"}
