"""A proxy to an etcd that breaks what its watches promise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from pyetcd import etcdrpc

STREAMS = ("/etcdserverpb.Watch/Watch", "/etcdserverpb.Lease/LeaseKeepAlive")


class WatchProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes every call on to ``to``; answers of watches that tell events go through ``fault``.

    ``fault`` gets each such answer as it comes, and returns what to send in its place.
    :attr:`broken` counts the answers that it did not pass on as they were, :attr:`asked` the calls
    of each method.
    """

    def __init__(self, to: str) -> None:
        self._channel = grpc.insecure_channel(to)
        self._lock = threading.Lock()
        self.fault: Callable[[Any], list[Any]] = lambda answer: [answer]
        self.broken = 0
        self.asked: dict[str, int] = {}
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=(self,))
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None)
        self._channel.close()

    def service(self, call: Any) -> Any:
        with self._lock:
            self.asked[call.method] = self.asked.get(call.method, 0) + 1
        if call.method in STREAMS:

            def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
                onward = self._channel.stream_stream(call.method)(
                    requests, metadata=context.invocation_metadata()
                )
                context.add_callback(onward.cancel)
                try:
                    for raw in onward:
                        yield from self._through(raw) if call.method == STREAMS[0] else [raw]
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.CANCELLED:
                        context.abort(error.code(), error.details())

            return grpc.stream_stream_rpc_method_handler(stream)

        def unary(request: bytes, context: Any) -> bytes:
            onward = self._channel.unary_unary(call.method)
            try:
                answer: bytes = onward(
                    request,
                    timeout=context.time_remaining(),
                    metadata=context.invocation_metadata(),
                )
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return answer

        return grpc.unary_unary_rpc_method_handler(unary)

    def _through(self, raw: bytes) -> list[bytes]:
        answer = etcdrpc.WatchResponse.FromString(raw)
        if not answer.events:
            return [raw]
        with self._lock:
            passed = self.fault(answer)
            self.broken += passed != [answer]
        return [each.SerializeToString() for each in passed]
