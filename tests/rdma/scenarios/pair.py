"""Unmodified programs of verbs over a cable between two devices, without and with the stand-in.

Usage: pair.py ENVIRONMENT DL_CLIENT    (JSON: variables that put the stand-in before a program;
the program of programs/dl_client.cc)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from lab.rdma.network import PAIR_ADDRESSES, connect_pair
from lab.rdma.recorder import Capture, Recorder

QUEUE_PAIRS = 4
MESSAGES = 25
MESSAGE_BYTES = 65536
#: What is planned for each direction, by the address that packets go to.
PLANNED_DSCP = dict(zip(PAIR_ADDRESSES, (46, 26), strict=True))
PLANNED_PORTS = dict(
    zip(PAIR_ADDRESSES, ((50001, 52003, 54005, 65535), (49152, 51002, 53004, 60006)), strict=True)
)
#: Devices and their indices of IPv4 GIDs, for programs that use both.
_ENDS = ("rxe0", "1", "rxe1", "1")
#: Debian's Python, for which python3-pyverbs is.
_PYTHON = "/usr/bin/python3"
_ROOT = Path(__file__).resolve().parents[3]
_LIST_DEVICES = """
import dataclasses, json
from crux_torch.host.rdma import rdma_devices
print(json.dumps([dataclasses.asdict(device) for device in rdma_devices()]))
"""


def main(environment: str, dl_client: str) -> None:
    out = Path.cwd()
    recorder = Recorder()
    start = time.monotonic()
    connect_pair()
    recorder.note("network", seconds=time.monotonic() - start)
    env = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'launcher'}"}
    recorder.run("listed", [_PYTHON, "-B", "-c", _LIST_DEVICES], env)
    routes = out / "routes"
    routes.write_text(
        "".join(
            f"{address} dscp {PLANNED_DSCP[address]} "
            f"ports {','.join(map(str, PLANNED_PORTS[address]))}\n"
            for address in PAIR_ADDRESSES
        )
    )
    steered = {**json.loads(environment), "CRUX_TRANSPORT_ROUTES": str(routes)}
    with Capture(out / "pair.pcap", "v0"):
        for case, more in (("plain", {}), ("standin", steered)):
            programs(recorder, case, {**os.environ, **more}, dl_client)


def programs(recorder: Recorder, case: str, env: dict[str, str], dl_client: str) -> None:
    def both(name: str, *argv: str) -> None:
        client = [*argv, "-d", "rxe1", PAIR_ADDRESSES[0]]
        recorder.exchange(f"{name} {case}", [*argv, "-d", "rxe0"], client, env)

    size, count = str(MESSAGE_BYTES), str(MESSAGES)
    perftest = ("-x", "1", "-F")
    pingpong = ("-g", "1", "-n", "100")
    both("write_bw", "ib_write_bw", *perftest, "-q", str(QUEUE_PAIRS), "-s", size, "-n", count)
    both("rc_pingpong", "ibv_rc_pingpong", *pingpong, "-c")
    both("rc_pingpong new_send", "ibv_rc_pingpong", *pingpong, "-c", "-N")
    both("rc_pingpong events", "ibv_rc_pingpong", *pingpong, "-e")
    both("srq_pingpong", "ibv_srq_pingpong", *pingpong, "-q", str(QUEUE_PAIRS))
    both("ud_pingpong", "ibv_ud_pingpong", *pingpong)
    both("read_lat", "ib_read_lat", *perftest, "-n", count)
    both("atomic_lat", "ib_atomic_lat", *perftest, "-n", count)
    for name, argv in (
        ("devices", ["ibv_devices"]),
        ("devinfo", ["ibv_devinfo", "-v"]),
        ("no such device", ["ibv_devinfo", "-d", "none"]),
        ("dl_client", [dl_client, *_ENDS]),
    ):
        recorder.run(f"{name} {case}", argv, env)


if __name__ == "__main__":
    main(*sys.argv[1:])
