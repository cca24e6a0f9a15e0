"""The scheduler extender over HTTP, with limits of size and time for each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from crux_torch.dispatch.extender import Extender
from crux_torch.errors import CruxError
from crux_torch.files import parse_json

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
#: Connections beyond these get status 503.
MAX_CONNECTIONS = 256
#: Seconds from the first byte of a request, or a connection's start, until the request is there.
REQUEST_S = 10.0
#: Seconds until a request is answered and its answer taken.
ANSWER_S = 60.0
#: Seconds for which a connection stays after an answer.
KEEP_S = 30


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
        told = f"expected kube-scheduler's ExtenderArgs: {error!r}"
        return JSONResponse(told[:1000], 400)
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
