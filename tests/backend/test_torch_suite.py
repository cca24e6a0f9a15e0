"""torch's own tests of torch.distributed come out under Crux as they do without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch_suite

#: Seconds after which the suite is taken to hang; on an idle machine it takes a few minutes.
LIMIT_S = 1800.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * LIMIT_S)]


def outcomes(folder: Path, mode: str, names: Collection[str] = ()) -> dict[str, str]:
    out = folder / f"{mode}.json"
    with (folder / f"{mode}.log").open("w") as log:
        subprocess.run(
            [sys.executable, torch_suite.__file__, str(out), mode, *names],
            env={**os.environ, "CRUX_STORE": "none"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=True,
        )
    found: dict[str, str] = json.loads(out.read_text())
    return found


def test_torchs_own_tests_come_out_alike(tmp_path: Path) -> None:
    # Side by side: they wait for each other's ranks and time-outs for most of the time.
    with ThreadPoolExecutor() as threads:
        stock, crux = threads.map(lambda mode: outcomes(tmp_path, mode), ("stock", "crux"))
    run = {name: it for name, it in stock.items() if not it.startswith(torch_suite.SKIPPED)}
    differ = [name for name in run if crux[name] != run[name]]
    if differ:
        # A busy machine makes some of them time out, with stock Gloo, too.
        run, crux = (outcomes(tmp_path, mode, differ) for mode in ("stock", "crux"))
    assert {name: crux[name] for name in differ} == {name: run[name] for name in differ}
    assert list(stock.values()).count(torch_suite.OK) >= 60
