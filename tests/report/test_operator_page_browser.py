"""The operator's page in Chromium: by keyboard and pointer, narrow, in the dark, and live."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from page_state import FakeReader

from crux_torch.report.page.operator_page import OperatorPage
from crux_torch.report.page.server import PageServer
from lab.browser import Browser, available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(available() is None, reason="no chromium: tools/apt.sh lab"),
]
HOSTILE = ("<script>document.title='hit'</script>", "<img src=x onerror=document.title='hit'>",
           "\"'><svg onload=document.title='hit'>", "javascript:document.title='hit'")  # fmt: skip
#: Width of the content beyond the window.
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
SHOWN = "document.querySelector('#detail h2')?.textContent"


class Place:
    """A page that is served; its reader may be changed."""

    def __init__(self, reader: FakeReader) -> None:
        self.reader = reader
        self.page = OperatorPage(reader)
        self.page.refresh()
        self.server = PageServer(self.page.routes(), ("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.page.end()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place(FakeReader())
    yield made
    made.close()


def test_a_keyboard_reaches_a_job_and_the_focus_goes_to_what_it_opens(place: Place) -> None:
    with Browser() as browser:
        browser.open(place.address)
        for _ in range(40):
            browser.press("Tab")
            if browser.value("document.activeElement.matches('#jobs a')"):
                break
        name = browser.value("document.activeElement.textContent")
        assert name in ("A", "B", "C", "D")
        assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        browser.press("Enter")
        browser.wait(f"{SHOWN} === 'Job {name}'")
        browser.wait("document.activeElement.id === 'detail'")
        assert browser.value("document.querySelectorAll('#map .on').length") > 0
        browser.value("history.back()")
        browser.wait(f"{SHOWN} === undefined")


def test_a_pointer_opens_a_link_and_a_host_on_the_map(place: Place) -> None:
    with Browser() as browser:
        browser.open(place.address)
        for selector, shown in (("[data-place=h0-0]", "Host or switch h0-0"), ("path", "Link ")):
            x, y = browser.value(
                f"(() => {{ const e = document.querySelector('#map {selector}'); "
                "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
                "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
            )
            browser.click(x, y)
            browser.wait(f"({SHOWN} || '').startsWith('{shown}')")


def test_a_change_reaches_the_page_and_the_focus_stays(place: Place) -> None:
    with Browser() as browser:
        browser.open(place.address)
        assert "3.21 s" not in browser.value("document.body.innerText")
        browser.value("document.querySelector('#jobs a[href=\"?job=C\"]').focus()")
        place.reader.steps_s = {**place.reader.steps_s, "C": 3.21}
        browser.wait("events.readyState === EventSource.OPEN")
        place.page.refresh()
        browser.wait("document.querySelector('#jobs').textContent.includes('3.21 s')")
        assert browser.value("document.activeElement.getAttribute('href')") == "?job=C"


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_is_usable_at_400_pixels_in_the_light_and_in_the_dark(
    place: Place, is_dark: bool
) -> None:
    with Browser(400, 800, is_dark) as browser:
        for query in ("", "?job=A", "?link=leaf0->spine1"):
            browser.open(place.address + query)
            assert browser.value(OVERFLOW) == 0
        colour = browser.value("getComputedStyle(document.body).backgroundColor")
        assert colour == ("rgb(20, 24, 31)" if is_dark else "rgb(255, 255, 255)")
        contrast = browser.value(CONTRAST)
        assert min(contrast.values()) >= 4.5, contrast


#: Contrast of text on the page, by selector, as WCAG 2 counts it.
CONTRAST = """(() => {
  const light = (c) => c.match(/\\d+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (e) => {
    const c = getComputedStyle(e).backgroundColor;
    return c !== "rgba(0, 0, 0, 0)" ? c : back(e.parentElement);
  };
  const found = {};
  for (const selector of ["h1", ".faint", "#jobs td", "#jobs a", "#detail dt", "#detail a"]) {
    const e = document.querySelector(selector);
    const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
    found[selector] = (a + 0.05) / (b + 0.05);
  }
  return found;
})()"""


def test_a_screen_reader_is_told_what_everything_is(place: Place) -> None:
    with Browser() as browser:
        browser.open(place.address + "?job=A")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
        for role, name in (
            ("heading", "Job A"), ("heading", "Shared links"), ("search", ""), ("main", ""),
            ("region", "Map"), ("searchbox", "Find a job"), ("link", "Skip to the jobs"),
            ("columnheader", "slowdown"),
        ):  # fmt: skip
            assert (role, name) in roles
        assert any(role in ("image", "img") and name.startswith("Map of 8 hosts")
                   for role, name in roles)  # fmt: skip
        nameless = {role for role, name in roles if role in ("link", "button", "image", "img",
                    "searchbox") and not name.strip()}  # fmt: skip
        assert not nameless


def test_names_are_text_whatever_they_say() -> None:
    made = Place(FakeReader(HOSTILE))
    try:
        with Browser() as browser:
            for name in ("", *HOSTILE):
                browser.open(made.address)
                browser.value(f"go('?' + new URLSearchParams({{job: {name!r}}}))")
                browser.wait(f"{SHOWN} === 'Job ' + {name!r}" if name else "true")
                assert browser.value("document.title") == "Crux: cluster lab"
                assert browser.value("document.querySelectorAll('img, iframe').length") == 0
                assert browser.value("document.scripts.length") == 1
    finally:
        made.close()
