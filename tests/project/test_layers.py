"""The packages keep their order: nothing imports what stands above it, and nothing in a circle."""

from __future__ import annotations

import subprocess
import sys

from importlinter.api import read_configuration
from places import ROOT

REPOSITORY = ROOT
CONFIG = str(REPOSITORY / "pyproject.toml")


def test_every_import_keeps_the_order_of_the_packages():
    # In a process of its own: it would disable the loggers of this one.
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", lint, "--config", CONFIG, "--no-cache", "--no-logo"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_and_file_has_its_place_in_the_order():
    contracts = read_configuration(CONFIG)["contracts_options"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    there = {
        f"{root.name}.{path.stem}"
        for root in (REPOSITORY / "crux_torch", REPOSITORY / "launcher/cruxrun")
        for path in root.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem != "__init__"
    }
    assert there == placed
