"""Links, anchors, named files and table cells of README, CONTRIBUTING, SECURITY and docs/."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: A file of the repository, as a page names it in code.
NAMED = re.compile(r"`((?:crux_torch|tests|benchmarks|evaluation|lab|tools|examples)/[\w./]+)`")
#: A Python name of the package: in code, or imported in a code block.
DOTTED = re.compile(r"`crux_torch((?:\.\w+){2,})|^from crux_torch((?:\.\w+)+) import (.+)$", re.M)
#: The longest text of a table cell, without link targets.
CELL = 110


@cache
def prose(page: Path) -> str:
    """The page without code blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        text = re.sub(r"\]\([^)]*\)", "", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 1
        while slug in found:
            slug = f"{slug.removesuffix(f'-{number - 1}')}-{number}"
            number += 1
        found.add(slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_relative_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it names files of its time")
    for name in NAMED.findall(prose(page)):
        assert (ROOT / name).exists() or "gpu_" in name or "TARGET" in name, name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_python_name_that_a_page_imports_exists(page: Path) -> None:
    for span, module, names in DOTTED.findall(page.read_text("utf-8")):
        parts = (span or module).strip(".").split(".")
        wanted = names.split(", ") if names else []
        file = ROOT / "crux_torch"
        while parts and (file / parts[0]).is_dir():
            file /= parts.pop(0)
        for source in (f"{parts[0]}.py", f"{parts[0]}.pyi") if parts else ():
            if (file / source).is_file():
                file /= source
                parts.pop(0)
        text = file.read_text("utf-8") if file.is_file() else (file / "__init__.py").read_text()
        for name in [*parts[:1], *wanted]:
            assert re.search(rf"\b{name}\b", text), (span or module, name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_table_cells_are_short(page: Path) -> None:
    if page == DOCS / "operate" / "settings.md":
        pytest.skip("its table is made from the settings")
    for line in prose(page).splitlines():
        if line.startswith("| "):
            cells = re.sub(r"\]\([^)]*\)", "", line).strip("|").split(" | ")
            assert all(len(cell.strip()) <= CELL for cell in cells), line


def test_the_index_names_every_page() -> None:
    index = DOCS / "README.md"
    named = {(DOCS / link).resolve() for link in LINK.findall(prose(index))}
    assert named >= set(DOCS.rglob("*.md")) - {index}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` page: c, d\n\n[x](gone.md) [y](#no)\n\n```\n# none\n```\n")
    assert anchors(page) == {"a-b-page-c-d"}
    with pytest.raises(AssertionError, match=r"gone\.md"):
        test_every_relative_link_leads_to_a_file_and_an_anchor(page)
