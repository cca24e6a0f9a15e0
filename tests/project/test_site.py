"""The documentation site builds without a warning, and every link in it leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from places import ROOT

pytest.importorskip("sphinx", reason="sphinx is missing: `make docs` installs it")
pytestmark = pytest.mark.full


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if key in ("href", "src") and value]
        self.anchors |= {value for key, value in attrs if key == "id" and value}


read = cache(Page)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-b", "html", "-c", "docs", "-W", "--keep-going", "-q"]
    ran = subprocess.run(
        [*build, "-d", str(out / "state"), ".", str(out / "html")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return out / "html"


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    checked = 0
    for file in site.rglob("*.html"):
        for link in read(file).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in read(target).anchors, (
                    f"{file.relative_to(site)}: {link}"
                )
            checked += 1
    assert checked > 1000


def test_the_first_page_has_a_menu_of_all_pages(site: Path) -> None:
    links = set(read(site / "index.html").links)
    assert {page.relative_to(site).as_posix() for page in site.glob("docs/*/*.html")} <= links


def test_llms_txt_names_the_source_of_every_page(site: Path) -> None:
    sources = re.findall(r"^- \[.+\]\((\S+)\): .+$", (site / "llms.txt").read_text(), re.M)
    assert {*(ROOT / "docs").glob("*/*.md")} == {
        ROOT / source.removeprefix("_sources/").removesuffix(".txt") for source in sources
    }
    assert all((site / source).is_file() for source in sources)


def test_the_reference_has_what_the_package_exports(site: Path) -> None:
    import crux_torch

    exported = {f"crux_torch.{name}" for name in crux_torch.__all__ if name[0] != "_"}
    assert exported <= read(site / "docs/api.html").anchors
