"""Print the state of a cluster's store, a line of JSON at a time, until standard input ends.

A process of its own, because it must run inside the network where the store is.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Mapping
from typing import Any

from crux_torch.errors import CruxError
from crux_torch.report.cluster_status import as_json_text, read_status
from crux_torch.settings import Settings

PAUSE_S = 0.5


def is_seen(status: Mapping[str, Any]) -> bool:
    """True if jobs have seen all paths of a network that nobody told them."""
    said = " ".join(status.get("network", ()))
    return "as its jobs saw it" in said and "without" not in said


def main(endpoint: str, secret: str, cluster: str) -> None:
    settings = Settings(store=endpoint, store_secret=secret, cluster=cluster)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        try:
            found = json.loads(as_json_text(read_status(settings)))
        except CruxError:
            continue
        print(json.dumps({"at": time.monotonic(), **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
