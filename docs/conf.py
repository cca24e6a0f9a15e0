"""Builds the documentation site, `make docs`: the pages as they are, docs/README.md as its menu."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from crux_torch import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
INDEX = "docs/README"
#: A table without a heading, by another tool.
LICENCES = "constraints/LICENCES"
#: A group's heading in the index, and its list of pages.
GROUP = re.compile(r"^\*\*(.+?)\*\*\n((?:- .+\n)+)", re.M)
PAGE = re.compile(r"- \[(.+?)\]\((.+?)\.md\): (.+)")

project = "crux_torch"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["README.md", "C*.md", "SECURITY.md", "constraints/*.md", "docs/**"]
exclude_patterns = ["build", "out", ".venv*", "tests", "benchmarks", "crux_torch"]
root_doc = "README"
html_theme = "furo"
html_title = f"crux_torch {release}"
html_copy_source = True
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"


def groups() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns the groups of the index: heading, and title, path and content of each page."""
    text = (ROOT / f"{INDEX}.md").read_text("utf-8")
    return [(heading, PAGE.findall(pages)) for heading, pages in GROUP.findall(text)]


def add_menu(app: Sphinx, docname: str, content: list[str]) -> None:
    """Give the first page a menu of all pages, and the licences a heading; forges need neither."""
    if docname == LICENCES:
        content[0] = "# Licences of what is installed\n\n" + content[0]
    if docname != root_doc:
        return
    for heading, pages in groups():
        entries = "\n".join(f"{title} <docs/{path}>" for title, path, _ in pages)
        content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{entries}\n```\n"
    more = f"{INDEX}\ndocs/api\nCONTRIBUTING\nSECURITY\nCHANGELOG\n{LICENCES}"
    content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: More\n\n{more}\n```\n"


def llms_txt() -> str:
    """Returns ``llms.txt`` (llmstxt.org): the pages' sources with a line about each."""
    lines = ["# crux_torch", "", "> Crux (SIGCOMM '24) for PyTorch: who goes first on the network."]
    for heading, pages in groups():
        lines += ["", f"## {heading}", ""]
        lines += [
            f"- [{title}](_sources/docs/{path}.md.txt): {says}" for title, path, says in pages
        ]
    return "\n".join(lines) + "\n"


def finish(app: Sphinx, failed: Exception | None) -> None:
    """Add what no builder makes: ``index.html`` and ``llms.txt``."""
    if failed is None and app.builder.format == "html":
        out = Path(app.outdir)
        shutil.copy(out / f"{root_doc}.html", out / "index.html")
        (out / "llms.txt").write_text(llms_txt(), "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_menu)
    app.connect("build-finished", finish)
