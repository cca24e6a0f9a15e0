"""The name of a release: version, CHANGELOG and tag agree, or an error says what to write."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from places import ROOT

SCRIPT = ROOT / "tools/release_name.py"
contradiction = runpy.run_path(str(SCRIPT))["contradiction"]
CHANGELOG = "# Changelog\n\n## 1.2.0 (2026-12-01)\n\n## 1.1.0 (2026-11-01)\n"


def test_version_changelog_and_tag_that_agree_have_no_contradiction() -> None:
    assert contradiction("1.2.0", CHANGELOG, "v1.2.0") == ""
    assert contradiction("1.2.0", CHANGELOG.replace("2026-12-01", "not released yet")) == ""


@pytest.mark.parametrize(
    ("version", "changelog", "tag", "remedy"),
    [
        ("1.3.0", CHANGELOG, "", "write `## 1.3.0`"),
        ("1.3.0", "", "", "begins with no version"),
        ("1.2.0", CHANGELOG, "1.2.0", "name the tag v1.2.0"),
        ("1.2.0", "## 1.2.0 (not released yet)", "v1.2.0", "write `## 1.2.0 (YYYY-MM-DD)`"),
        ("1.2.0", "## 1.2.0", "v1.2.0", "write `## 1.2.0 (YYYY-MM-DD)`"),
    ],
)
def test_a_contradiction_says_what_to_write(
    version: str, changelog: str, tag: str, remedy: str
) -> None:
    assert remedy in contradiction(version, changelog, tag)


def test_this_tree_has_a_name_and_takes_no_other_tag() -> None:
    named = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert named.returncode == 0, named.stderr
    wrong = subprocess.run([sys.executable, SCRIPT, "v0.0.0"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("the tag is v0.0.0")
