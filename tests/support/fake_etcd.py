"""An etcd without content, in as far as a store process at rest asks it: PORT and a RULE.

The rule says of which watches it tells the progress: ``always``, as etcd 3.4 does, or ``not before
its start``, as 3.5.30 does: of those that begin at a revision that is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from pyetcd import etcdrpc

REVISION = 7


class Keys(etcdrpc.KVServicer):  # type: ignore[misc]
    def Range(self, _request: Any, _context: Any) -> Any:
        return etcdrpc.RangeResponse(header=etcdrpc.ResponseHeader(revision=REVISION))


class Watches(etcdrpc.WatchServicer):  # type: ignore[misc]
    def __init__(self, rule: str) -> None:
        self._rule = rule

    def Watch(self, requests: Iterator[Any], _context: Any) -> Iterator[Any]:
        start = 0
        header = etcdrpc.ResponseHeader(revision=REVISION)
        for request in requests:
            if request.HasField("create_request"):
                start = request.create_request.start_revision
                yield etcdrpc.WatchResponse(header=header, created=True)
            elif self._rule == "always" or start <= REVISION:
                yield etcdrpc.WatchResponse(header=header, watch_id=-1)


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(8))
    etcdrpc.add_KVServicer_to_server(Keys(), server)
    etcdrpc.add_WatchServicer_to_server(Watches(sys.argv[2]), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
