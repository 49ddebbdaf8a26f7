# SPDX-License-Identifier: Apache-2.0
"""The HTTP face of the service. Its description is served at /openapi.json (openapi.py)."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sonde.errors import SondeError
from sonde.server import answers, pages
from sonde.server.openapi import document
from sonde.server.selfmetrics import exposition
from sonde.server.service import AUDIT, RefusedRequestError, Service
from sonde.server.tokens import Caller, Scope
from sonde.store.wal import WalBusyError, WalFailedError

_WORTH_PACKING = 64 << 10
"""Bytes of an answer."""

Handler = Callable[[Request], Awaitable[Response]]


def refusal(status: int, cause: str, remedy: str = "", **headers: str) -> JSONResponse:
    """An error as every client gets it."""
    return JSONResponse({"error": cause, "remedy": remedy}, status, headers)


def _packed(request: Request, answer: answers.Answer) -> Response:
    """The answer, compressed where the client takes that and it is worth it."""
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    content = answer.content
    if len(content) > _WORTH_PACKING and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, 1)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(content, media_type=answer.media_type, headers=headers)


class Api:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.limits
        self._bodies_bytes = 0
        self._threads = ThreadPoolExecutor(self._limits.queries, "sonde-query")
        self._asked = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/chunks", self._guarded(Scope.INGEST, self._chunks), methods=["POST"]),
            Route("/v1/tokens", self._guarded(Scope.ADMIN, self._tokens)),
            Route("/healthz", self._health),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
        ]
        routes += [
            Route(f"/v1/{name}", self._guarded(Scope.READ, self._query(question)))
            for name, question in answers.QUESTIONS.items()
        ]
        return Starlette(routes=[*routes, *pages.routes()])

    def _guarded(
        self, scope: Scope, handler: Callable[[Request, Caller], Awaitable[Response]]
    ) -> Handler:
        async def guarded(request: Request) -> Response:
            started = time.monotonic()
            caller = self._service.caller(request.headers.get("authorization", ""))
            if caller is None:
                response: Response = refusal(
                    401,
                    "no valid token",
                    "send Authorization: Bearer TOKEN (`sonde token`)",
                    **{"WWW-Authenticate": "Bearer"},
                )
            elif scope not in caller.scopes:
                response = refusal(403, f"this token is not for {scope}", "use another token")
            else:
                try:
                    response = await handler(request, caller)
                except RefusedRequestError as error:
                    response = refusal(error.status, error.cause, error.remedy)
                except (WalBusyError, WalFailedError) as error:
                    self._service.counters.refuse("disk")
                    response = refusal(503, error.cause, error.remedy, **{"Retry-After": "5"})
                except SondeError as error:
                    response = refusal(400, error.cause, error.remedy)
            if response.status_code >= 400 or scope is not Scope.INGEST:
                AUDIT.info(
                    "%s",
                    json.dumps(
                        {
                            "token": caller.id if caller else "",
                            "tenant": caller.tenant if caller else "",
                            "method": request.method,
                            "path": request.url.path[:200],
                            "query": str(request.url.query)[:500],
                            "status": response.status_code,
                            "ms": round(1000 * (time.monotonic() - started), 1),
                            "from": request.client.host if request.client else "",
                        }
                    ),
                )
            return response

        return guarded

    async def _chunks(self, request: Request, caller: Caller) -> Response:
        started = time.perf_counter()
        body = await self._body(request, caller)
        node = request.headers.get("x-sonde-node", "")
        try:
            taken = self._service.take(caller, node, body)
            for future, _ in taken:
                await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self._bodies_bytes -= len(body)
        self._service.counters.acked(time.perf_counter() - started)
        new = sum(fresh for _, fresh in taken)
        return JSONResponse({"accepted": new, "duplicates": len(taken) - new})

    async def _body(self, request: Request, caller: Caller) -> bytes:
        """The whole body; the caller gives its bytes back. Raises RefusedRequestError."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedRequestError(415, "chunks are compressed already", "send them as they are")
        told = request.headers.get("content-length", "")
        if told.isdigit() and int(told) > self._limits.body_bytes:
            self._service.counters.refuse("large")
            raise RefusedRequestError(413, "the request is too large", "send fewer chunks at once")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    size += len(part)
                    self._bodies_bytes += len(part)
                    if size > self._limits.body_bytes:
                        self._service.counters.refuse("large")
                        raise RefusedRequestError(413, "the request is too large", "send fewer")
                    if self._bodies_bytes > self._limits.bodies_bytes:
                        self._service.counters.refuse("busy")
                        raise RefusedRequestError(503, "too much is sent at once", "try later")
                    parts.append(part)
            self._service.admit(caller, size)
        except TimeoutError:
            self._bodies_bytes -= size
            self._service.counters.refuse("slow")
            raise RefusedRequestError(408, "the request came too slowly", "send it again") from None
        except BaseException:
            self._bodies_bytes -= size
            raise
        return b"".join(parts)

    def _query(
        self, question: answers.Question
    ) -> Callable[[Request, Caller], Awaitable[Response]]:
        async def handler(request: Request, caller: Caller) -> Response:
            self._service.admit(caller, 0)
            if self._asked >= self._limits.queries + self._limits.queries_waiting:
                raise RefusedRequestError(503, "too many queries at once", "try again later")
            self._asked += 1
            try:
                self._service.counters.queries += 1
                options = answers.parse(request.query_params.multi_items())
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(
                    self._threads, answers.ask, self._service, caller, question, options
                )
            except BaseException:
                self._service.counters.query_failures += 1
                raise
            finally:
                self._asked -= 1
            return _packed(request, answer)

        return handler

    async def _tokens(self, _request: Request, caller: Caller) -> Response:
        listed = [one for one in self._service.tokens.listed() if one.tenant == caller.tenant]
        names = ("id", "tenant", "scopes", "made_s", "expires_s", "revoked_s")
        return JSONResponse([{name: getattr(one, name) for name in names} for one in listed])

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _request: Request) -> Response:
        """Whether chunks are taken; where not, why."""
        why: list[Any] = [
            text
            for text in (self._service.wal.counters.error, self._service.flusher.get("error"))
            if text
        ]
        if why:
            return refusal(503, "; ".join(map(str, why)), "free space, see the server's log")
        return PlainTextResponse("ready\n")

    async def _metrics(self, _request: Request) -> Response:
        text = exposition(self._service)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse(document())
