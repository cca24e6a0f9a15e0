"""What a run of the suite found, written while it goes on: it may be cut off at any moment."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rig.kind import Kind


class Report:
    """The outcomes of the tests and the figures that they measured.

    Args:
        path: JSON file, and beside it the same for readers (``.txt``); None to write nothing.
        kind: what the suite runs on.
    """

    def __init__(self, path: Path | None, kind: Kind) -> None:
        self._path = path
        self._begin = time.monotonic()
        self.content: dict[str, Any] = {
            "device": kind.model,
            "kind": kind.name,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind.is_gpu else None,
            "python": platform.python_version(),
            "complete": False,
            "seconds": 0.0,
            "tests": {},
            "figures": {},
        }

    def test(self, name: str, outcome: str, seconds: float, why: str = "") -> None:
        """Keep what became of a test."""
        self.content["tests"][name] = {"outcome": outcome, "seconds": round(seconds, 2), "why": why}
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Keep what a test measured, before it is judged."""
        self.content["figures"][name] = value
        self._write()

    def end(self) -> None:
        """Say that every test had its turn."""
        self.content["complete"] = True
        self._write()

    def _write(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._begin, 1)
        if self._path is None:
            return
        for suffix, text in ((".json", json.dumps(self.content, indent=1)), (".txt", self.text())):
            draft = self._path.with_suffix(".new")
            draft.write_text(text + "\n")
            draft.replace(self._path.with_suffix(suffix))

    def text(self) -> str:
        """The report for readers."""
        found = self.content
        lines = [
            f"{found['device']}, torch {found['torch']}, NCCL {found['nccl']}",
            f"{found['seconds']:.0f} s, "
            + ("all tests had their turn" if found["complete"] else "CUT OFF"),
            "",
        ]
        tests = found["tests"].values()
        outcomes = Counter(test["outcome"] for test in tests)
        lines.append(", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
        skips = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
        lines += [f"  {n} skipped: {why}" for why, n in skips.most_common()]
        lines += [
            f"{test['outcome']:8} {test['seconds']:7.1f} s  {name}"
            + (f"  ({test['why']})" if test["why"] else "")
            for name, test in found["tests"].items()
        ]
        lines.append("")
        for name, value in found["figures"].items():
            lines += [name, *(f"  {line}" for line in json.dumps(value, indent=1).splitlines())]
        return "\n".join(lines)
