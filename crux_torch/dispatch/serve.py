"""A scheduler extender for Kubernetes over HTTP: kube-scheduler asks which nodes a pod may use.

kube-scheduler posts ``ExtenderArgs`` as JSON, and reads ``ExtenderFilterResult`` and
``HostPriorityList`` (k8s.io/kube-scheduler/extender/v1). The kubelet chooses GPUs too late to
choose nodes, so this comes before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from threading import Lock
from typing import Any

import h11
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from crux_torch.dispatch.cluster import DispatchError
from crux_torch.dispatch.dispatcher import Dispatcher
from crux_torch.errors import CruxError
from crux_torch.files import parse_json

_log = logging.getLogger(__name__)

RESOURCE = "nvidia.com/gpu"
#: Annotations or labels of a pod: GPUs of all pods of its job, and the job's name.
JOB_GPUS, JOB = "crux-torch/job-gpus", "crux-torch/job"
#: ``MaxExtenderPriority``.
MAX_SCORE = 10
#: The most GPUs that one job, or one pod, may ask for.
MAX_GPUS = 1 << 20
#: Seconds for which the pods of one job are sent to the same nodes.
REMEMBERED_S = 600.0
#: Choices that are compared for nodes' scores.
COMPARED = 8
MAX_BODY_BYTES = 64 << 20
#: Connections beyond these get status 503.
MAX_CONNECTIONS = 256
#: Seconds from the first byte of a request, or a connection's start, until the request is there.
REQUEST_S = 10.0
#: Seconds until a request is answered and its answer taken.
ANSWER_S = 60.0
#: Seconds for which a connection stays after an answer.
KEEP_S = 30


class Extender:
    """Answers kube-scheduler.

    Thread safety: threads may call it at once.

    Args:
        dispatcher: returns the hosts and the jobs that run on them now. May raise a CruxError.
    """

    def __init__(
        self, dispatcher: Callable[[], Dispatcher], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher, self._clock = dispatcher, clock
        self._nodes_of: dict[str, tuple[float, frozenset[str]]] = {}
        self._lock = Lock()

    def filter(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """``ExtenderFilterResult``: the nodes with enough free GPUs, and why others lack them."""
        k, names = gpus_of(args["Pod"]), _names(args)
        failed: dict[str, str] = {}
        if k:
            try:
                dispatcher = self._dispatcher()
            except CruxError as error:
                return {"Error": str(error)}
            free = {
                table.host: bin(members).count("1")
                for table, members in zip(
                    dispatcher.cluster.tables, dispatcher.free.tolist(), strict=True
                )
            }
            for name in names:
                if name not in free:
                    failed[name] = "there is no table of its GPUs: crux dispatch measure"
                elif free[name] < k:
                    failed[name] = f"{k} GPUs asked for, and {free[name]} are free"
        result: dict[str, Any] = {"FailedNodes": failed, "Error": ""}
        if args.get("Nodes") is not None:
            kept = [n for n in args["Nodes"]["items"] if n["metadata"]["name"] not in failed]
            result["Nodes"] = {**args["Nodes"], "items": kept}
        else:
            result["NodeNames"] = [name for name in names if name not in failed]
        return result

    def prioritize(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``HostPriorityList``: 10 for the nodes of the best choice, 0 for the worst.

        A pod whose job has more GPUs than the pod itself is sent to the nodes of the best choice
        for the whole job, and the job's other pods to the same.

        Raises:
            CruxError: the hosts, or the jobs that run, can't be told.
        """
        pod, names = args["Pod"], _names(args)
        k = gpus_of(pod)
        scores = dict.fromkeys(names, 0)
        if k:
            total = max(k, _gpus(_noted(pod, JOB_GPUS) or 0))
            if total > k:
                scores |= dict.fromkeys(self._nodes_for(pod, names, k, total), MAX_SCORE)
            else:
                scores |= self._scores(names, k)
        return [{"Host": name, "Score": scores[name]} for name in names]

    def _scores(self, names: Sequence[str], k: int) -> dict[str, int]:
        """Each node by the best choice on it alone."""
        dispatcher = self._dispatcher()
        worth = {}
        known = {table.host for table in dispatcher.cluster.tables}
        for name in known.intersection(names):
            try:
                best = next(dispatcher.choices(k, [name]))
            except DispatchError:
                continue
            worth[name] = best.worth
        if not worth:
            return {}
        low, high = min(worth.values()), max(worth.values())
        if not np.isfinite(high) or high == low:
            return dict.fromkeys(worth, MAX_SCORE)
        return {n: round(MAX_SCORE * (w - low) / (high - low)) for n, w in worth.items()}

    def _nodes_for(
        self, pod: Mapping[str, Any], names: Sequence[str], k: int, total: int
    ) -> frozenset[str]:
        """The nodes of the job's best choice, which the job's first pod decides."""
        key = _job_of(pod)
        with self._lock:
            now = self._clock()
            known = {k: v for k, v in self._nodes_of.items() if now - v[0] < REMEMBERED_S}
            self._nodes_of = known
            if key in known and known[key][1] & set(names):
                return known[key][1] & set(names)
            dispatcher = self._dispatcher()
            unit = k if total % k == 0 else 1
            best = max(
                islice(dispatcher.choices(total, names, unit), COMPARED), key=lambda one: one.worth
            )
            nodes = frozenset(dispatcher.cluster.names(best.devices))
            if key:
                self._nodes_of[key] = now, nodes
            return nodes


def gpus_of(pod: Mapping[str, Any]) -> int:
    """The GPUs that a pod's containers ask for."""
    total = 0
    for container in pod.get("spec", {}).get("containers") or ():
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        total += _gpus(asked.get(RESOURCE, 0))
    return total


def _gpus(given: Any) -> int:
    count = int(given)
    if not 0 <= count <= MAX_GPUS:
        raise ValueError(f"{count} GPUs asked for: expected 0 to {MAX_GPUS}")
    return count


def _names(args: Mapping[str, Any]) -> list[str]:
    if args.get("Nodes") is not None:
        return [str(node["metadata"]["name"]) for node in args["Nodes"]["items"]]
    return [str(name) for name in args.get("NodeNames") or ()]


def _noted(pod: Mapping[str, Any], key: str) -> str | None:
    meta = pod.get("metadata") or {}
    value = (meta.get("annotations") or {}).get(key) or (meta.get("labels") or {}).get(key)
    return None if value is None else str(value)


def _job_of(pod: Mapping[str, Any]) -> str:
    """Name that the pods of one job share; empty where it is unknown."""
    meta = pod.get("metadata") or {}
    owners = meta.get("ownerReferences") or [{}]
    name = _noted(pod, JOB) or str(owners[0].get("uid", ""))
    return f"{meta.get('namespace', '')}/{name}" if name else ""


class _TimedConnection(H11Protocol):
    """Ends a connection whose request takes too long to come, or whose answer is not taken.

    uvicorn itself bounds only the time between an answer and the next request's first byte.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_S, self._end_slow, False)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._end_slow, False)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._stop()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None

    def _end_slow(self, answering: bool) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or answering:
            self.transport.abort()
        else:
            self._deadline = self.loop.call_later(ANSWER_S, self._end_slow, True)


def app(extender: Extender) -> Starlette:
    """Returns the application: ``/filter`` and ``/prioritize`` by POST, ``/healthz`` by GET.

    Whatever a request holds gets a JSON answer: 400 for what kube-scheduler does not send, 413 for
    too much of it, 500 with the reason where the hosts or the jobs can't be told.
    """

    def verb(carry_out: Callable[[Mapping[str, Any]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await _body(request)
            return await run_in_threadpool(_answer, carry_out, body)

        return endpoint

    async def healthy(request: Request) -> Response:
        return JSONResponse("ok")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(error.detail, error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/filter", verb(extender.filter), methods=["POST"]),
            Route("/prioritize", verb(extender.prioritize), methods=["POST"]),
            Route("/healthz", healthy),
        ],
        exception_handlers={HTTPException: refused},
    )


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            limit = f"expected at most {MAX_BODY_BYTES >> 20} MiB"
            raise HTTPException(413, limit, {"Connection": "close"})
    return b"".join(parts)


def _answer(carry_out: Callable[[Mapping[str, Any]], Any], body: bytes) -> Response:
    try:
        return JSONResponse(carry_out(parse_json(body)))
    except CruxError as error:
        return JSONResponse(str(error), 500)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = f"expected kube-scheduler's ExtenderArgs: {error!r}"
        return JSONResponse(expected[:1000], 400)
    except Exception as error:
        _log.exception("a request could not be answered")
        return JSONResponse(f"{type(error).__name__}: {error}"[:1000], 500)


def server_of(extender: Extender) -> uvicorn.Server:
    """Returns a server: ``run([listener])`` serves a bound TCP socket until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app(extender),
        http=_TimedConnection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_S,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)
