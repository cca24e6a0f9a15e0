"""The operator's page without a browser: what it shows, from which state, and to whom."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from networks import LEAF_SPINE
from page_state import FakeReader

import crux_torch.report.page as report_page
from crux_torch.network.builders import two_layer_clos
from crux_torch.network.loaders import parse_yaml
from crux_torch.report.live_cluster import LinkLoad
from crux_torch.report.page.cluster_map import MapLayout, step_of
from crux_torch.report.page.hour import HOUR_S, MULTIPLES, PERIOD_S, Hour, Sample
from crux_torch.report.page.operator_page import Answer, OperatorPage
from crux_torch.report.page.server import MAX_REQUESTS, PageServer

HOSTILE = (
    "<script>hit()</script>",
    "'\"><img src=x onerror=hit()>",
    "a&b;\x1b[2J\n",
    "}}{{ 7*7 }}",
)


class Outline(HTMLParser):
    """Tags with the names of their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def page_of(reader: FakeReader) -> OperatorPage:
    page = OperatorPage(reader, lambda: 1.8e9 + 120)
    page.refresh()
    return page


def text_of(page: OperatorPage, **query: str) -> str:
    return re.sub(r"\s+", " ", Outline(page.html(query)).text)


def test_hosts_are_in_the_lowest_row_below_their_switches_and_no_two_places_coincide() -> None:
    drawn = MapLayout(parse_yaml(LEAF_SPINE)).draw({})
    at = {place.name: place for place in drawn.places}
    assert {at[host].y for host in ("h0", "h1", "h2")} == {max(p.y for p in drawn.places)}
    assert at["leaf0"].y == at["leaf1"].y > at["spine0"].y == at["spine1"].y
    assert len(drawn.cables) == 7
    assert all(cable.ratio == cable.step == 0 for cable in drawn.cables)
    large = MapLayout(two_layer_clos(hosts=40, tors=10, aggregations=4)).draw({})
    assert len({(p.x, p.y) for p in large.places}) == len(large.places) == 54
    assert all(0 < p.x < large.width and 0 < p.y < large.height for p in large.places)


def test_a_cable_has_the_colour_of_its_direction_that_carries_more() -> None:
    layout = MapLayout(parse_yaml(LEAF_SPINE))
    loads = {
        "leaf0->spine0": LinkLoad(1e8, 3e7, None, ("a",)),
        "spine0->leaf0": LinkLoad(1e8, 9e7, None, ("a", "b")),
    }
    (cable,) = (c for c in layout.draw(loads).cables if c.ends == ("leaf0", "spine0"))
    assert cable.links == ("spine0->leaf0", "leaf0->spine0")
    assert (cable.ratio, cable.step) == (0.9, 4)
    assert [step_of(r) for r in (0.0, 0.1, 0.25, 0.26, 0.6, 1.0, 1.01)] == [0, 1, 1, 2, 3, 4, 5]


def test_jobs_links_and_plans_are_shown_with_who_shares_what() -> None:
    reader = FakeReader(spines=(0, 1, 0, 1))
    page = page_of(reader)
    text = text_of(page)
    assert "cluster lab at this user's store: plan 3 by A" in text
    assert "Map of 8 hosts, 4 switches and 12 links" in page.html({})
    assert "Plan 0 → 1" in text
    assert "then: A: level default -> 6" in text
    assert "why: pin A 5" in text
    of_a = text_of(page, job="A")
    assert "Job A" in of_a
    assert re.search(r"leaf0->spine0 \d+% C ", of_a), "shared with C alone"
    assert "leaf0->spine1" not in of_a.split("Job A")[1].split("Close")[0]
    link = text_of(page, link="leaf0->spine1").split("Link leaf0->spine1")[1].split("Close")[0]
    assert {"B", "D"} <= set(link.split())
    assert not {"A", "C"} & set(link.split())
    host = text_of(page, place="h0-0").split("Host or switch h0-0")[1].split("Close")[0]
    assert "kind host" in host
    assert "h0-0->leaf0" in host


@pytest.mark.parametrize("kind", ["job", "link", "place"])
def test_what_is_not_there_is_said(kind: str) -> None:
    assert "not there now" in text_of(page_of(FakeReader()), **{kind: "gone"})
    assert "no job of that name" in text_of(page_of(FakeReader()), q="zzz")


def test_without_a_topology_the_map_says_so() -> None:
    page = page_of(FakeReader(has_topology=False))
    assert "have no topology, so there is no map" in text_of(page)
    assert "<path" not in page.html({})
    assert json.loads(page.json_text())["links"] is None


def test_jobs_whose_paths_nobody_knows_are_counted() -> None:
    reader = FakeReader()
    assert "hash chooses" not in text_of(page_of(reader))
    reader.has_plan = False
    text = text_of(page_of(reader))
    assert "chooses the paths of 4 of 4 jobs" in text
    assert "no plan" in text


def test_names_from_outside_change_no_tag_and_no_attribute() -> None:
    plain, hostile = page_of(FakeReader()), page_of(FakeReader(HOSTILE))
    for kind, harmless, names in (("q", "", ("",)), ("job", "A", HOSTILE), ("place", "A", HOSTILE)):
        for name in names:
            asked = plain.html({kind: harmless}), hostile.html({kind: name})
            outlines = [sorted(Outline(text).tags) for text in asked]
            assert outlines[0] == outlines[1]
    shown = Outline(hostile.html({})).text
    for name in ("<script>hit()</script>", "a&b;�[2J�", "}}{{ 7*7 }}"):
        assert name in shown
    assert "\x1b" not in hostile.html({})


def test_a_store_that_is_away_is_said_and_what_was_known_stays() -> None:
    reader = FakeReader()
    reader.is_away = True
    page = page_of(reader)
    assert "The store is away: nobody answers" in text_of(page)
    reader.is_away = False
    page.refresh()
    reader.is_away = True
    page.refresh()
    text = text_of(page)
    assert "The store is away: nobody answers at unix:" in text
    assert "Job" not in text.split("Map")[0]
    assert "level 6" in text
    reader.is_away = False
    page.refresh()
    assert "store is away" not in text_of(page)


def test_an_hour_is_kept_of_the_most_slowed_with_its_gaps() -> None:
    hour = Hour()
    reader = FakeReader()
    for number in range(200):
        reader.steps_s = {"A": 1.0 + number / 100} if number % 50 else {}
        hour.add(reader.read(), None, number * PERIOD_S / 2)
    assert len(hour.samples) == 100, "one in a period"
    hour.add(reader.read(), None, 100 * PERIOD_S + HOUR_S)
    assert len(hour.samples) == 1
    seen = [Sample(30.0 * n, {f"j{i}": 1.0 + i for i in range(20)} if n != 2 else {}, None)
            for n in range(5)]  # fmt: skip
    hour.samples = tuple(seen)
    multiples = hour.multiples()
    assert [m.title for m in multiples] == [f"j{i}" for i in range(19, 19 - MULTIPLES, -1)]
    assert len(multiples[0].points) == 2, "a gap is no line"
    assert (multiples[0].last, multiples[0].top) == (20.0, 20.0)
    assert hour.busiest_link() is None


def test_the_head_is_sent_before_the_rest_is_made(monkeypatch) -> None:
    monkeypatch.setattr(report_page, "PIECE", 1000)
    page = page_of(FakeReader())
    pieces = page.pieces({})
    head = next(pieces)
    assert head.startswith(b"<!doctype html>")
    assert b"</html>" not in head
    whole = head + b"".join(pieces)
    assert whole.endswith(b"</html>")
    assert list(page.pieces({})) == [whole], "it is kept until the next reading"
    assert page.html({}).encode() == whole


@pytest.fixture
def served() -> Iterator[tuple[OperatorPage, FakeReader, PageServer]]:
    reader = FakeReader()
    page = page_of(reader)
    server = PageServer(page.routes(), ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield page, reader, server
    page.end()
    server.shutdown()
    server.server_close()
    thread.join()


def asked(server: PageServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_the_server_gives_the_page_and_the_state_of_crux_status(served) -> None:
    page, reader, server = served
    answer = asked(server, "/?job=A")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.read().decode() == page.html({"job": "A"})
    state = json.loads(asked(server, "/api/state").read())
    assert [job["job"] for job in state["status"]["jobs"]] == ["A", "B", "C", "D"]
    assert state["status"]["steps"]["A"]["step_s"] == reader.steps_s["A"]
    assert state["audit"][0]["who"] == "A"
    assert state["links"]["leaf0->spine1"]["jobs"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/nothing", {}, 404),
        ("/", {"Host": "evil.example"}, 421),
        ("/", {"Host": "127.0.0.1.evil.example"}, 421),
        ("/", {"Host": "localhost:1"}, 200),
        ("/", {"Host": "[::1]:80"}, 200),
        ("/?" + "a=1&" * 1000, {}, 400),
        ("/" + "x" * 70_000, {}, 414),
    ],
)
def test_what_the_server_refuses(served, path: str, headers: dict, status: int) -> None:
    assert asked(served[2], path, **headers).status == status


def test_streams_tell_of_every_change_and_are_bounded(served) -> None:
    page, _, server = served
    streams = [asked(server, "/events") for _ in range(MAX_REQUESTS)]
    for stream in streams:
        assert stream.readline() == b": hello\n"
    assert asked(server, "/").status == 503
    page.refresh()
    stream = streams[0]
    assert [stream.readline() for _ in range(2)] == [b"\n", b"data: 2\n"]
    page.end()
    assert stream.read() == b"\n", "streams end with the page"


def test_a_route_that_fails_is_an_error_and_the_server_goes_on(caplog) -> None:
    def broken(_: object) -> Answer:
        raise ValueError("broken")

    page = page_of(FakeReader())
    server = PageServer({**page.routes(), "/broken": broken}, ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    assert asked(server, "/broken").status == 500
    assert asked(server, "/").status == 200
    server.shutdown()
    server.server_close()
    thread.join()
    assert "broken" in caplog.text
