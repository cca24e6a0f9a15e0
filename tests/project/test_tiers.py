"""The files that `make test-all` names to pytest are all that have tests for it."""

from __future__ import annotations

import subprocess

import pytest
from places import ROOT
from tiers import MARKED, MARKS

NAMED_BY = dict(zip(MARKS, ("FULL_FILES", "ALONE_FILES", "PROPERTY_FILES"), strict=True))


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
