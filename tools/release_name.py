"""Prints the name of the release in this tree; fails if its files or its tag contradict each other.

    python tools/release_name.py [TAG]

The version in ``crux_torch/_version.py`` has to be the first heading of CHANGELOG.md. A TAG has to
be `v` and this version, and the heading has to have the date of the release.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def contradiction(version: str, changelog: str, tag: str = "") -> str:
    """What is wrong and what to do; empty if nothing is."""
    heading = re.search(r"^## (\S+)(?: \((.*)\))?$", changelog, re.M)
    if not heading or heading[1] != version:
        found = heading[1] if heading else "no version"
        return f"CHANGELOG.md begins with {found}, the version is {version}: write `## {version}`"
    if not tag:
        return ""
    if tag != f"v{version}":
        return f"the tag is {tag}, the version {version}: name the tag v{version}"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2] or ""):
        return f"CHANGELOG.md has no date for {version}: write `## {version} (YYYY-MM-DD)`"
    return ""


def main(tag: str = "") -> None:
    version = runpy.run_path(str(ROOT / "crux_torch/_version.py"))["__version__"]
    if problem := contradiction(version, (ROOT / "CHANGELOG.md").read_text("utf-8"), tag):
        raise SystemExit(problem)
    print(tag or f"v{version}, without a tag")


if __name__ == "__main__":
    main(*sys.argv[1:])
