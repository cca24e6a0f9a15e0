"""Marks that divide the tests, and the files where they were collected."""

from __future__ import annotations

import pytest

MARKS = ("full", "alone", "hypothesis")
#: Of each mark, the files that have tests with it.
MARKED = pytest.StashKey[dict[str, set[str]]]()
