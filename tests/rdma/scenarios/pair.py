"""Unmodified programs of verbs over a cable between two devices, without and with the stand-in."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lab.network import PAIR_ADDRESSES, connect_pair
from lab.recorder import Capture, Recorder

QUEUE_PAIRS = 4
MESSAGES = 25
MESSAGE_BYTES = 65536


def main() -> None:
    out = Path.cwd()
    recorder = Recorder(out)
    start = time.monotonic()
    connect_pair()
    recorder.note("network", seconds=time.monotonic() - start)
    with Capture(out / "pair.pcap", "v0"):
        programs(recorder, "plain")


def programs(recorder: Recorder, case: str) -> None:
    write_bw = ["ib_write_bw", "-x", "1", "-F", "-q", str(QUEUE_PAIRS)]
    write_bw += ["-s", str(MESSAGE_BYTES), "-n", str(MESSAGES), "-d"]
    recorder.exchange(
        f"ib_write_bw {case}", [*write_bw, "rxe0"], [*write_bw, "rxe1", PAIR_ADDRESSES[0]]
    )
    pingpong = ["ibv_rc_pingpong", "-g", "1", "-n", "100", "-c", "-d"]
    recorder.exchange(
        f"ibv_rc_pingpong {case}", [*pingpong, "rxe0"], [*pingpong, "rxe1", PAIR_ADDRESSES[0]]
    )
    recorder.run(f"ibv_devinfo {case}", ["ibv_devinfo", "-v"])


if __name__ == "__main__":
    sys.exit(main())
