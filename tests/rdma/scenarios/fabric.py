"""Leaf and spine switches between two devices: which spine RoCEv2 takes, and what foretells it.

Usage: fabric.py PYTHON    (the Python that has crux_torch)
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from lab.network import FABRIC_ADDRESSES, SPINES, connect_fabric
from lab.recorder import Capture, Recorder

#: As many queue pairs as ports are foretold.
QUEUE_PAIRS = 24
#: Spread over what rdma-core's flow labels can give, 49152 to 65535.
PROBED_PORTS = [49152 + 389 * i for i in range(QUEUE_PAIRS)]
_PROBE = str(Path(__file__).with_name("probe_spines.py"))


def main(python: str) -> None:
    out = Path.cwd()
    recorder = Recorder(out)
    start = time.monotonic()
    connect_fabric()
    recorder.note("network", seconds=time.monotonic() - start)
    here, there = FABRIC_ADDRESSES
    ports = [str(port) for port in PROBED_PORTS]
    there_ports = recorder.run("probe there", [python, "-B", _PROBE, here, there, *ports])
    recorder.run("probe back", [python, "-B", _PROBE, there, here, *ports])
    json.loads(there_ports.stdout)
    with ExitStack() as captures:
        for spine in SPINES:
            captures.enter_context(Capture(out / f"{spine}.pcap", "down0", spine))
        write_bw(recorder, "stock ports", QUEUE_PAIRS)


def write_bw(recorder: Recorder, name: str, queue_pairs: int) -> None:
    argv = ["ib_write_bw", "-x", "1", "-F", "-q", str(queue_pairs), "-s", "4096", "-n", "5", "-d"]
    recorder.exchange(name, [*argv, "rxe1"], [*argv, "rxe0", FABRIC_ADDRESSES[1]])


if __name__ == "__main__":
    main(*sys.argv[1:])
