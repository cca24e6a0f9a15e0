"""Where the public traces are, for the tests that read them."""

from __future__ import annotations

import pytest
from places import ROOT

DATA = ROOT.parent / "shared" / "data"
PHILLY, SIZES = DATA / "philly.csv.gz", DATA / "lingjun_job_sizes.csv"
needs_data = pytest.mark.skipif(
    not (PHILLY.exists() and SIZES.exists()), reason=f"the public traces are not in {DATA}"
)
