"""perftest's bandwidth and latency, without and with the shim in turn.

Usage: speed.py ENVIRONMENT ROUNDS    (ENVIRONMENT as in pair.py)
"""

from __future__ import annotations

import json
import os
import sys

from lab.rdma.network import PAIR_ADDRESSES, connect_pair
from lab.rdma.recorder import Recorder

#: Of each program: arguments that make a run long enough to be timed, and short enough for many.
PROGRAMS = {
    "ib_write_bw 64 KiB": ("ib_write_bw", "-s", "65536", "-n", "300", "-t", "16"),
    "ib_write_bw 4 KiB": ("ib_write_bw", "-s", "4096", "-n", "2000", "-t", "16"),
    "ib_send_lat 8 B": ("ib_send_lat", "-s", "8", "-n", "2000"),
}
CASES = ("plain", "shim")


def main(environment: str, rounds: str) -> None:
    connect_pair()
    recorder = Recorder()
    envs = {"plain": dict(os.environ), "shim": {**os.environ, **json.loads(environment)}}
    for i in range(int(rounds)):
        for name, argv in PROGRAMS.items():
            # Whichever goes first meets a machine in another state: take turns at that too.
            for case in CASES if i % 2 == 0 else reversed(CASES):
                common = [*argv, "-x", "1", "-F", "-d"]
                client = [*common, "rxe1", PAIR_ADDRESSES[0]]
                recorder.exchange(f"{name} {case} {i}", [*common, "rxe0"], client, envs[case])


if __name__ == "__main__":
    main(*sys.argv[1:])
