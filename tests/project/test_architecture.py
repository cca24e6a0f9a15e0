"""docs/understand/architecture.md names files and functions that exist."""

from __future__ import annotations

import re

import pytest
from places import ROOT

REPOSITORY = ROOT
CODE = re.findall(r"`([^`\n]+)`", (REPOSITORY / "docs/understand/architecture.md").read_text())
PATHS = sorted({name for name in CODE if re.fullmatch(r"[\w./]+(/|\.(py|cc|h|toml))", name)})
NAMES = sorted({name for name in CODE if re.fullmatch(r"[A-Z]\w+(\.|::)\w+", name)})


@pytest.mark.parametrize("path", PATHS)
def test_a_file_of_the_page_exists(path: str) -> None:
    places = (REPOSITORY, REPOSITORY / "crux_torch", REPOSITORY / "launcher/cruxrun")
    assert any((place / path).exists() for place in places)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_of_the_page_is_in_a_file_that_the_page_names(name: str) -> None:
    kind, method = re.split(r"\.|::", name)
    texts = [file.read_text() for path in PATHS if (file := REPOSITORY / path).is_file()]
    assert any(
        re.search(rf"\bclass {kind}\b", text) and re.search(rf"\b{method}\(", text)
        for text in texts
        if "::" not in name
    ) or any(f"{name}(" in text or re.search(rf"\bvoid {method}\(", text) for text in texts)
