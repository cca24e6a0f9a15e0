"""Prints how many lines and branches of each package the tests reached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePath

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def package(path: str) -> str:
    """Of ``crux_torch/sim/fluid.py``: ``crux_torch/sim``."""
    return PurePath(path).parent.as_posix()


def share(covered: int, of: int) -> str:
    return f"{100 * covered / of:6.1f}%" if of else "      -"


def line(name: str, counts: Counter[str]) -> str:
    lines, covered_lines, branches, covered_branches = (counts[each] for each in COUNTS)
    return (
        f"{name:24}{lines:8}{share(covered_lines, lines):>9}"
        f"{branches:10}{share(covered_branches, branches):>9}"
    )


def main() -> None:
    out = Path("build/coverage/report.json")
    command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(out)]
    subprocess.run(command, check=True)
    packages: dict[str, Counter[str]] = {}
    for path, found in json.loads(out.read_text())["files"].items():
        counts = packages.setdefault(package(path), Counter())
        counts.update({each: found["summary"][each] for each in COUNTS})
    print(f"{'package':24}{'lines':>8}{'reached':>9}{'branches':>10}{'reached':>9}")
    for name in sorted(packages):
        print(line(name, packages[name]))
    print(line("all", sum(packages.values(), Counter())))


if __name__ == "__main__":
    main()
