"""Where the public traces are, for the tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"
PHILLY, SIZES = DATA / "philly.csv.gz", DATA / "lingjun_job_sizes.csv"
needs_data = pytest.mark.skipif(
    not (PHILLY.exists() and SIZES.exists()), reason=f"the public traces are not in {DATA}"
)
