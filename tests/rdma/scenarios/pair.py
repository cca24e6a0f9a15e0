"""Unmodified programs of verbs over a cable between two devices, without and with the shim.

Usage: pair.py ENVIRONMENT LIBNCCL    (JSON: variables that put the shim before a program;
"" for LIBNCCL: there is none)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from lab.rdma.network import PAIR_ADDRESSES, connect_pair
from lab.rdma.recorder import EXCHANGE_PORT, Capture, Recorder

QUEUE_PAIRS = 4
MESSAGES = 25
MESSAGE_BYTES = 65536
#: What is planned for each direction, by the address that packets go to.
PLANNED_DSCP = dict(zip(PAIR_ADDRESSES, (46, 26), strict=True))
PLANNED_PORTS = dict(
    zip(PAIR_ADDRESSES, ((50001, 52003, 54005, 65535), (49152, 51002, 53004, 60006)), strict=True)
)
#: A communicator of this group is asked to send with this class.
GROUP, GROUP_DSCP = "data_parallel", 34
#: What NCCL's variables say instead: class and service level.
VARIABLE_CLASS, VARIABLE_LEVEL = 105, 3
#: NCCL's variables: so many queue pairs for a connection, and each message over all of them.
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_IB_QPS_PER_CONNECTION": str(QUEUE_PAIRS),
    "NCCL_IB_SPLIT_DATA_ON_QPS": "1",
}
#: Debian's Python, for which python3-pyverbs is.
_PYTHON = "/usr/bin/python3"
_ROOT = Path(__file__).resolve().parents[3]
_NCCL_NET = Path(__file__).with_name("nccl_net.py")
_LIST_DEVICES = """
import dataclasses, json
from crux_torch.host.interfaces import rdma_devices
print(json.dumps([dataclasses.asdict(device) for device in rdma_devices()]))
"""


def main(environment: str, libnccl: str) -> None:
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
            f"{address} qp_dscp {PLANNED_DSCP[address]} "
            f"ports {','.join(map(str, PLANNED_PORTS[address]))}\n"
            for address in PAIR_ADDRESSES
        )
    )
    steered = {**json.loads(environment), "CRUX_TRANSPORT_ROUTES": str(routes)}
    # What a job without a DSCP map has: paths alone.
    unmarked = {**steered, "CRUX_TRANSPORT_ROUTES": str(out / "unmarked")}
    (out / "unmarked").write_text(
        "".join(f"{a} ports {','.join(map(str, PLANNED_PORTS[a]))}\n" for a in PAIR_ADDRESSES)
    )
    with Capture(out / "pair.pcap", "v0"):
        for case, more in (("plain", {}), ("shim", steered)):
            programs(recorder, case, {**os.environ, **more})
            if libnccl:
                nccl = [_PYTHON, "-B", "-S", str(_NCCL_NET), libnccl]
                found = {**env, **NCCL, **more}
                recorder.run(f"nccl {case}", nccl, found)
                of_group = [*nccl, GROUP, str(GROUP_DSCP)]
                recorder.run(f"nccl group {case}", of_group, found)
                found |= {"NCCL_IB_TC": str(VARIABLE_CLASS), "NCCL_IB_SL": str(VARIABLE_LEVEL)}
                recorder.run(f"nccl variables {case}", of_group, found)
        if libnccl:
            nccl = [_PYTHON, "-B", "-S", str(_NCCL_NET), libnccl]
            recorder.run("nccl unmarked", nccl, {**env, **NCCL, **unmarked})


def programs(recorder: Recorder, case: str, env: dict[str, str]) -> None:
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
    # Both ends take the client's device, so nothing of it crosses the cable.
    ucx = ["ucx_perftest", "-t", "am_bw", "-x", "rc_verbs", "-D", "zcopy", "-n", count, "-w", "1"]
    ucx += ["-s", "4096", "-p", str(EXCHANGE_PORT), "-d", "rxe1:1"]
    recorder.exchange(f"ucx {case}", ucx, [*ucx, PAIR_ADDRESSES[0]], env)
    for name, argv in (
        ("devices", ["ibv_devices"]),
        ("devinfo", ["ibv_devinfo", "-v"]),
        ("no such device", ["ibv_devinfo", "-d", "none"]),
    ):
        recorder.run(f"{name} {case}", argv, env)


if __name__ == "__main__":
    main(*sys.argv[1:])
