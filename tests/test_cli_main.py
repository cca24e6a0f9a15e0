"""The two commands as a shell sees them: their releases, and Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import pytest
import torch
from training_job import BOUND_S, environment

from crux_torch import __version__


@pytest.mark.parametrize("module", ["cruxrun", "crux_torch.cli"])
def test_version(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    release, of_torch = re.escape(__version__), re.escape(torch.__version__.split("+")[0])
    expected = {
        "cruxrun": rf"cruxrun {release} \(torch {of_torch}.*\)\n",
        "crux_torch.cli": rf"crux, version {release}\n",
    }
    assert re.fullmatch(expected[module], said.stdout)
    assert said.stderr == ""


def test_ctrl_c_ends_crux_with_130_and_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "crux_torch.cli", "status", "--store", store]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment(), **pipes)  # type: ignore[call-overload]
        silent.settimeout(BOUND_S)
        # It waits for an answer of the store now.
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out, err) == (130, b"", b"")
