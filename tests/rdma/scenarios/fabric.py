"""Leaf and spine switches between two devices: which spine RoCEv2 takes, and what foretells it.

Usage: fabric.py PYTHON ENVIRONMENT    (the Python that has crux_torch; JSON as for pair.py)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lab.rdma.capture_file import read_capture
from lab.rdma.network import FABRIC_ADDRESSES, SPINE_ADDRESSES, SPINES, connect_fabric
from lab.rdma.recorder import Capture, Recorder

#: As many queue pairs as ports are foretold.
QUEUE_PAIRS = 24
#: Spread over what rdma-core's flow labels can give, 49152 to 65535.
PROBED_PORTS = [49152 + 389 * i for i in range(QUEUE_PAIRS)]
#: All queue pairs of the second plan go over this spine.
STEERED_SPINE = 1
STEERED_QUEUE_PAIRS = 4
#: By the address that packets go to.
PLANNED_DSCP = dict(zip(FABRIC_ADDRESSES, (10, 34), strict=True))
_PROBE = str(Path(__file__).with_name("probe_spines.py"))


def main(python: str, environment: str) -> None:
    out = Path.cwd()
    recorder = Recorder()
    start = time.monotonic()
    connect_fabric()
    recorder.note("network", seconds=time.monotonic() - start)
    with ExitStack() as captures:
        spines_seen = [
            captures.enter_context(Capture(out / f"{spine}.pcap", "down0", spine))
            for spine in SPINES
        ]
        write_bw(recorder, "stock ports", QUEUE_PAIRS, os.environ)
        for capture in spines_seen:
            capture.settle()
        stock = {
            packet.source_port
            for spine in SPINES
            for packet in read_capture(out / f"{spine}.pcap")
            if packet.is_request
        }
        spines = {
            ends[1]: probe(recorder, name, python, ends, [*sorted(stock), *PROBED_PORTS])
            for name, ends in (("there", FABRIC_ADDRESSES), ("back", FABRIC_ADDRESSES[::-1]))
        }
        steered = {**os.environ, **json.loads(environment)}
        steered["CRUX_TRANSPORT_ROUTES"] = str(out / "routes")
        write_routes(out / "routes", dict.fromkeys(FABRIC_ADDRESSES, PROBED_PORTS))
        write_bw(recorder, "planned ports", QUEUE_PAIRS, steered)
        write_routes(
            out / "routes",
            {
                address: [p for p in PROBED_PORTS if spines[address][p] == SPINES[STEERED_SPINE]]
                for address in FABRIC_ADDRESSES
            },
        )
        write_bw(recorder, "planned spine", STEERED_QUEUE_PAIRS, steered)


def write_routes(file: Path, ports: Mapping[str, Sequence[int]]) -> None:
    """A route to each end, for ``CRUX_TRANSPORT_ROUTES``."""
    file.write_text(
        "".join(
            f"{address} qp_dscp {dscp} ports {','.join(map(str, ports[address]))}\n"
            for address, dscp in PLANNED_DSCP.items()
        )
    )


def probe(
    recorder: Recorder, name: str, python: str, ends: Sequence[str], ports: Sequence[int]
) -> dict[int, str]:
    """The spine's name for each source port of packets from the first to the second end."""
    here = FABRIC_ADDRESSES.index(ends[0])
    names = {
        addresses[here]: spine for spine, addresses in zip(SPINES, SPINE_ADDRESSES, strict=True)
    }
    done = recorder.run(f"probe {name}", [python, "-B", _PROBE, *ends, *map(str, ports)])
    if done.status != 0:
        raise RuntimeError(f"probing failed: {done}")
    answers = json.loads(done.stdout)["spines"]
    spines = {int(port): names[address] for port, address in answers.items()}
    recorder.note(f"foretold {name}", spines=spines)
    return spines


def write_bw(recorder: Recorder, name: str, queue_pairs: int, env: Mapping[str, str]) -> None:
    argv = ["ib_write_bw", "-x", "1", "-F", "-q", str(queue_pairs), "-s", "4096", "-n", "5", "-d"]
    recorder.exchange(name, [*argv, "rxe1"], [*argv, "rxe0", FABRIC_ADDRESSES[1]], env)


if __name__ == "__main__":
    main(*sys.argv[1:])
