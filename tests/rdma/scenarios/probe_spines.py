"""Probes which spine each source port leads over: prints the ports by the spine's address.

Usage: probe_spines.py SOURCE DESTINATION PORT...    (run with the package's own Python)
"""

from __future__ import annotations

import json
import sys

from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.prober import probe
from crux_torch.network.probe.rules import Rules

#: The spine is the second router on the way.
SPINE_TTL = 2


def main(source: str, destination: str, *ports: str) -> None:
    found = probe(
        destination,
        ROCE_V2_PORT,
        "udp",
        source=source,
        ports=[int(port) for port in ports],
        ttls=[SPINE_TTL],
        seed=None,
        # As many ports of each path as there are at all: so every port is asked.
        rules=Rules(ports_per_path=len(ports)),
    )
    answers = {port: dict(hops)[SPINE_TTL] for port, hops in found.hops.items()}
    print(
        json.dumps(
            {
                "torch": "torch" in sys.modules,
                "spines": answers,
                "changed": found.changed,
                "sent": found.sent,
                "seconds": found.seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
