# SPDX-License-Identifier: Apache-2.0
"""The HTTP handlers of the service, described at /openapi.json (openapi.py)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sonde.errors import SondeError
from sonde.http_host import is_direct
from sonde.server import agent_list, answers, fleet_releases, incidents, pages
from sonde.server.admission import Bodies, RequestLog
from sonde.server.children import AT_ONCE
from sonde.server.chunk_intake import ChunkIntake
from sonde.server.collection_pauses import PausedBy
from sonde.server.openapi import document
from sonde.server.opened import FILES_KEY, Opener
from sonde.server.otlp_ingest import OtlpIngest, sender_node
from sonde.server.paced_text import PacedText
from sonde.server.parameters import parse
from sonde.server.selfmetrics import exposition
from sonde.server.sending import PacedResponse, packed
from sonde.server.served_session import BeyondMemoryError
from sonde.server.service import RefusedRequestError, Service
from sonde.server.silent import accepted
from sonde.server.tokens import Caller, Scope
from sonde.server.turns import Turns
from sonde.server.unsent import Unsent
from sonde.store.wal import WalBusyError, WalFailedError

Handler = Callable[[Request], Awaitable[Response]]


def refusal(status: int, cause: str, remedy: str = "", **headers: str) -> JSONResponse:
    """An error as every client gets it."""
    return JSONResponse({"error": cause, "remedy": remedy}, status, headers)


DRAINED_BODIES = 4
DRAIN_S = 5.0
"""Of a body that is too large, this much is read and dropped, in bodies of the greatest size and
seconds: its sender must get the answer."""


async def _unanswered(_request: Request, error: Exception) -> Response:
    """The answer to a path or a method that there is not: nobody has shown a token."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {}) | {"Connection": "close"}
    return PlainTextResponse(getattr(error, "detail", ""), status, headers)


class Api:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.limits
        self.bodies = Bodies(self._limits, service.counters)
        self.requests = RequestLog(service.counters)
        self.otlp = OtlpIngest(service, self.bodies)
        self._intake = ChunkIntake(service)
        waiting = self._limits.queries_waiting
        self._questions = Turns(self._limits.queries - 1, waiting, waiting // 2)
        """One tenant uses at most all threads but one."""
        self._unsent = Unsent(self._limits.unsent_bytes, service.counters.refuse)
        self._threads = ThreadPoolExecutor(self._limits.queries, "sonde-query")
        # Questions with a child wait for theirs apart, so that others go on meanwhile.
        self._child_questions = Turns(AT_ONCE - 1, waiting, waiting // 2)
        self._child_threads = ThreadPoolExecutor(AT_ONCE, "sonde-child")
        # With one tenant alone, nobody else waits for the child that it has besides.
        files_key = FILES_KEY if service.is_open else ""
        self._opener = Opener(service.folder / "spill", service.children, files_key)
        self._exposition = PacedText(self._exposed)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/chunks", self._guarded(Scope.INGEST, self._chunks), methods=["POST"]),
            Route(
                "/v1development/profiles",
                self._guarded(Scope.INGEST, self._profiles),
                methods=["POST"],
            ),
            Route("/v1/collection", self._guarded(Scope.INGEST, self._collection)),
            Route(
                "/v1/collection", self._guarded(Scope.ADMIN, self._set_collection), methods=["PUT"]
            ),
            Route("/v1/agents", self._guarded(Scope.READ, self._agents)),
            Route("/v1/incidents", self._guarded(Scope.READ, self._incidents)),
            Route("/v1/alerts", self._guarded(Scope.READ, self._alerts)),
            Route("/v1/fleet", self._guarded(Scope.READ, self._fleet)),
            Route("/v1/open", self._guarded(Scope.READ, self._open), methods=["POST"]),
            Route("/v1/identity", self._guarded(Scope.READ, self._identity)),
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
        return Starlette(
            routes=[*routes, *pages.routes()], exception_handlers={HTTPException: _unanswered}
        )

    def _guarded(
        self, scope: Scope, handler: Callable[[Request, Caller], Awaitable[Response]]
    ) -> Handler:
        """The handler for callers with a scope, with errors as refusals, and the audit log."""

        async def guarded(request: Request) -> Response:
            started = time.monotonic()
            caller, refused = None, None
            try:
                caller = await self._service.authenticated(request.headers.get("authorization", ""))
            except RefusedRequestError as error:
                refused = error
            if self._service.is_open and not is_direct(request.headers.get("host", "")):
                response: Response = refusal(
                    421, "the server is not called that", "use its address, or start it with tokens"
                )
            elif refused is not None:
                self._service.counters.refuse("issuer")
                challenge = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
                headers = refused.headers | challenge
                response = refusal(refused.status, refused.cause, refused.remedy, **headers)
            elif caller is None:
                response = refusal(
                    401,
                    "no valid token",
                    "send Authorization: Bearer TOKEN (`sonde token`)",
                    **{"WWW-Authenticate": "Bearer"},
                )
            elif scope not in caller.scopes:
                response = refusal(403, f"this token is not for {scope}", "use another token")
            else:
                accepted(request.scope, "" if self._service.is_open else caller.tenant)
                try:
                    response = await handler(request, caller)
                except RefusedRequestError as error:
                    response = refusal(error.status, error.cause, error.remedy, **error.headers)
                except (WalBusyError, WalFailedError) as error:
                    self._service.counters.refuse("disk")
                    response = refusal(503, error.cause, error.remedy, **{"Retry-After": "5"})
                except BeyondMemoryError as error:
                    self._service.counters.refuse("memory")
                    response = refusal(413, error.cause, error.remedy)
                except SondeError as error:
                    response = refusal(400, error.cause, error.remedy)
                except ClientDisconnect:  # nobody gets this answer; the audit log has it
                    self._service.counters.refuse("gone")
                    response = refusal(400, "the request ended within its body", "send it again")
                except Exception:
                    response = refusal(500, "the server has a defect", "see its log")
                    self.requests.failed(f"{request.method} {request.url.path[:200]}")
            if caller is None or response.status_code in (408, 413):
                # The rest of the request is not read, and the connection is free for others.
                response.headers["Connection"] = "close"
            if response.status_code < 400:
                is_logged = scope is not Scope.INGEST
            else:
                is_logged = self.requests.may_note_refusal(caller)
            if is_logged:
                about = {
                    "method": request.method,
                    "path": request.url.path[:200],
                    "query": str(request.url.query)[:500],
                    "status": response.status_code,
                    "ms": round(1000 * (time.monotonic() - started), 1),
                    "from": request.client.host if request.client else "",
                }
                self.requests.note(caller, about | ({"why": refused.cause} if refused else {}))
            return response

        return guarded

    async def _chunks(self, request: Request, caller: Caller) -> Response:
        started = time.perf_counter()
        node = self._note_agent(request, caller)
        body = await self._body(request, caller)
        try:
            taken = await self._intake.take(caller, node, body)
            for future, _ in taken:
                await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self.bodies.give_back(caller.tenant, len(body))
        self._service.counters.acked(time.perf_counter() - started)
        new = sum(fresh for _, fresh in taken)
        collect = not self._service.pauses.is_paused(caller.tenant)
        counted = {"accepted": new, "duplicates": len(taken) - new, "collect": collect}
        return JSONResponse(counted)

    def _note_agent(self, request: Request, caller: Caller) -> str:
        """Note that an agent was seen just now; returns the name of its node."""
        node = request.headers.get("x-sonde-node", "")
        self._service.note_agent(caller, node, request.headers.get("x-sonde-state", ""))
        return node

    async def _agents(self, request: Request, caller: Caller) -> Response:
        """What the tenant's agents do."""

        def answer() -> answers.Answer:
            agents = self._service.agents.of(caller.tenant)
            paused = self._service.pauses.paused(caller.tenant)
            found = agent_list.listed(agents, paused, request.query_params.get("after", ""))
            return answers.Answer(found, "application/json")

        return await self._answered(request, caller, answer)

    async def _collection(self, request: Request, caller: Caller) -> Response:
        """Whether the tenant's agents are to collect."""
        self._service.admit(caller, 0)
        self._note_agent(request, caller)
        return JSONResponse({"collect": not self._service.pauses.is_paused(caller.tenant)})

    async def _set_collection(self, request: Request, caller: Caller) -> Response:
        """Pause or resume the tenant's agents."""
        self._service.admit(caller, 0)
        collect = request.query_params.get("collect", "")
        if collect == "true":
            self._service.pauses.resume(caller.tenant, PausedBy.TENANT)
        elif collect == "false":
            self._service.pauses.pause(caller.tenant, PausedBy.TENANT)
        else:
            raise RefusedRequestError(400, "neither on nor off", "give collect=true or false")
        return JSONResponse({"collect": not self._service.pauses.is_paused(caller.tenant)})

    async def _profiles(self, request: Request, caller: Caller) -> Response:
        """OTLP profiles: acknowledged as chunks are."""
        if request.headers.get("content-type", "").partition(";")[0] != "application/x-protobuf":
            raise RefusedRequestError(415, "not protobuf", "send application/x-protobuf")
        encoding = request.headers.get("content-encoding", "").lower()
        sender = sender_node(request.client.host if request.client else "")
        body = await self._body(request, caller, ("", "identity", "gzip"))
        try:
            node = request.headers.get("x-sonde-node", "") or sender
            await self.otlp.take(caller, body, encoding, node)
        finally:
            self.bodies.give_back(caller.tenant, len(body))
        return Response(b"", media_type="application/x-protobuf")

    async def _body(
        self, request: Request, caller: Caller, encodings: Sequence[str] = ("identity",)
    ) -> bytes:
        """The whole body; which must be given back (`Bodies`). Raises RefusedRequestError."""
        if request.headers.get("content-encoding", "identity").lower() not in encodings:
            remedy = "use gzip, or none" if "gzip" in encodings else "send chunks as they are"
            raise RefusedRequestError(415, "no such encoding", remedy)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            self._service.counters.refuse("large")
            await self._drain(request)
            raise RefusedRequestError(413, "the request is too large", "send less at once")
        with self.bodies.place(caller.tenant):
            return await self._received(request, caller)

    async def _drain(self, request: Request) -> None:
        """Read and drop what of a refused body comes soon, up to some limit: where a connection is
        closed while its client sends, the client may get no answer, and would send it again."""
        left = DRAINED_BODIES * self._limits.body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                async for part in request.stream():
                    left -= len(part)
                    if left < 0:
                        return

    async def _received(self, request: Request, caller: Caller) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    size += len(part)
                    self.bodies.charge(caller.tenant, len(part))
                    if size > self._limits.body_bytes:
                        self._service.counters.refuse("large")
                        raise RefusedRequestError(
                            413, "the request is too large", "send less at once"
                        )
                    parts.append(part)
            self._service.admit(caller, size)
        except TimeoutError:
            self.bodies.give_back(caller.tenant, size)
            self._service.counters.refuse("slow")
            raise RefusedRequestError(408, "the request came too slowly", "send it again") from None
        except BaseException:
            self.bodies.give_back(caller.tenant, size)
            raise
        return b"".join(parts)

    def _query(
        self, question: answers.Question
    ) -> Callable[[Request, Caller], Awaitable[Response]]:
        async def handler(request: Request, caller: Caller) -> Response:
            def answer() -> answers.Answer:
                options = parse(request.query_params.multi_items())
                return answers.ask(self._service, caller, question, options)

            self._service.counters.queries += 1
            try:
                return await self._answered(request, caller, answer, question.has_child)
            except BaseException:
                self._service.counters.query_failures += 1
                raise

        return handler

    async def _answered(
        self,
        request: Request,
        caller: Caller,
        answer: Callable[[], answers.Answer],
        has_child: bool = False,
    ) -> Response:
        """Call `answer` in a thread when it is the tenant's turn. Raises RefusedRequestError."""
        turns = self._child_questions if has_child else self._questions
        threads = self._child_threads if has_child else self._threads
        self._service.admit(caller, 0)
        self._unsent.check(caller.tenant)
        loop = asyncio.get_running_loop()
        with turns.place(caller.tenant):
            async with turns.turn(caller.tenant):
                found = await loop.run_in_executor(threads, lambda: packed(request, answer()))
        return PacedResponse(found, self._unsent, caller.tenant)

    async def _incidents(self, request: Request, caller: Caller) -> Response:
        def answer() -> answers.Answer:
            found = incidents.listed(self._service.incidents_of(caller))
            return answers.Answer(found, "application/json")

        return await self._answered(request, caller, answer)

    async def _alerts(self, request: Request, caller: Caller) -> Response:
        def answer() -> answers.Answer:
            source = self._service.alerts
            none: dict[str, Any] = {"rules": [], "alerts": [], "not_shown": 0}
            found = source.listed(caller.tenant) if source else none
            return answers.Answer(json.dumps(found).encode(), "application/json")

        return await self._answered(request, caller, answer)

    async def _fleet(self, request: Request, caller: Caller) -> Response:
        def answer() -> answers.Answer:
            found = fleet_releases.listed(self._service.fleet)
            return answers.Answer(found, "application/json")

        return await self._answered(request, caller, answer)

    async def _open(self, request: Request, caller: Caller) -> Response:
        """A file that the caller sends, as the page shows it; nothing of it is kept."""
        # Pages of other sites can send some other types without a CORS preflight.
        if request.headers.get("content-type", "") != "application/octet-stream":
            raise RefusedRequestError(415, "no file", "send application/octet-stream")
        self._service.admit(caller, 0)
        self._unsent.check(caller.tenant)
        length = request.headers.get("content-length", "")
        declared_bytes = int(length) if length.isdigit() and len(length) < 20 else 0
        room = functools.partial(self._unsent.room_bytes, caller.tenant)
        answer = await self._opener.open(caller.tenant, declared_bytes, request.stream(), room)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, packed, request, answer)
        return PacedResponse(found, self._unsent, caller.tenant)

    async def _identity(self, _request: Request, caller: Caller) -> Response:
        """Whose data the caller sees: the page switches between tenants by their tokens."""
        self._service.admit(caller, 0)
        return JSONResponse(
            {
                "tenant": caller.tenant,
                "scopes": sorted(map(str, caller.scopes)),
                "open": self._service.is_open,
            }
        )

    async def _tokens(self, _request: Request, caller: Caller) -> Response:
        self._service.admit(caller, 0)
        listed = [one for one in self._service.tokens.listed() if one.tenant == caller.tenant]
        names = ("id", "tenant", "scopes", "made_s", "expires_s", "revoked_s")
        return JSONResponse([{name: getattr(one, name) for name in names} for one in listed])

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n", headers={"Connection": "close"})

    async def _ready(self, _request: Request) -> Response:
        """Whether chunks are taken; where not, why."""
        why: list[Any] = [
            text
            for text in (self._service.wal.counters.error, self._service.flusher.get("error"))
            if text
        ]
        if why:
            return refusal(
                503, "; ".join(map(str, why)), "free space, see the server's log",
                Connection="close",
            )  # fmt: skip
        return PlainTextResponse("ready\n", headers={"Connection": "close"})

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(
            await self._exposition.text(),
            media_type="text/plain; version=0.0.4",
            headers={"Connection": "close"},
        )

    async def _exposed(self) -> str:
        # In a thread: the disk may be slow, and other requests must not wait for it.
        stored = await asyncio.to_thread(self._service.catalog.counters)
        return exposition(self._service, stored)

    async def _openapi(self, _request: Request) -> Response:
        return Response(
            _description(), media_type="application/json", headers={"Connection": "close"}
        )


@functools.cache
def _description() -> bytes:
    """What /openapi.json answers: who asks needs no token, so it is made once."""
    return bytes(JSONResponse(document()).body)
