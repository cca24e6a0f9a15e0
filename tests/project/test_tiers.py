"""Every test is collected, and the files that `make test-all` names are all that it needs."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest
from places import ROOT, TESTS
from tiers import MARKED, MARKS

NAMED_BY = dict(zip(MARKS, ("FULL_FILES", "ALONE_FILES", "PROPERTY_FILES"), strict=True))


def test_no_two_files_have_one_name() -> None:
    """Pytest imports a file that is in no package by its name alone: of two it would refuse one."""
    files = [f for f in TESTS.rglob("test_*.py") if not f.with_name("__init__.py").exists()]
    names = Counter(file.name for file in files)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("mark", NAMED_BY)
def test_no_file_of_a_tier_is_missing(pytestconfig: pytest.Config, mark: str) -> None:
    show = f"show: ; @echo $({NAMED_BY[mark]})"
    make = ["make", "--silent", f"--eval={show}", "show"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    named = done.stdout.split()
    missing = {
        file for file in pytestconfig.stash[MARKED][mark] if not file.startswith(tuple(named))
    }
    assert named
    assert not missing
