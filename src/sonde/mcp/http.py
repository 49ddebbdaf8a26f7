# SPDX-License-Identifier: Apache-2.0
"""The tools over HTTP (MCP's streamable transport), on loopback: each request has its own token.

The token of a request is passed on to the server with every question that the request asks, so a
client sees its tenant alone, although others use the same process. No session is kept.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonde.mcp.accepted_tokens import AcceptedTokens
from sonde.server.addresses import BACKLOG
from sonde.server.listen import protocol_with
from sonde.server.service import RefusedRequestError, ServerLimits
from sonde.server.silent import accepted
from sonde.server.turns import Places

PATH = "/mcp"
"""Where the tools are."""
BODY_BYTES = 64 << 10
"""Most bytes of a request's body: a call of a tool has less than a tenth."""
BODY_S = 10.0
"""Within which a body has to arrive."""
STRANGERS_BODY_S = 2.0
"""The same where the server has not accepted the token."""
CONNECTIONS = 256
"""At once; beyond it a client gets 503."""
STRANGERS = CONNECTIONS // 4
"""Of these, on which no request has had a token that the server accepts; the oldest is closed."""
BODIES = CONNECTIONS // 2
"""Bodies that are awaited at once; beyond it the oldest is given up."""
REQUESTS = CONNECTIONS * 3 // 4
"""With accepted tokens, that are answered at once; beyond its share a tenant gets 503."""
REQUESTS_OF_TENANT = CONNECTIONS // 2
"""Of these, of one tenant while no other asks."""
_TOKEN_CHARS = 4_096

_TOKEN: contextvars.ContextVar[str] = contextvars.ContextVar("sonde_mcp_token", default="")


def token_of_request() -> str:
    """The token that came with the request being answered; '' outside of one."""
    return _TOKEN.get()


def application(server: MCPServer[object], port: int, tokens: AcceptedTokens) -> ASGIApp:
    """The ASGI application. `port`: on which it is reached, as browsers have it in `Host`;
    `tokens`: which tokens the server accepts."""
    inner = server.streamable_http_app(
        streamable_http_path=PATH,
        json_response=True,
        stateless_http=True,
        max_request_body_size=BODY_BYTES,
        transport_security=_only_loopback(port),
    )

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            yield

    outer = Starlette(lifespan=lifespan)
    outer.mount("/", _WithToken(inner, tokens))
    return outer


def serve(
    server: MCPServer[object], listening: socket.socket, tenant_of: Callable[[str], str | None]
) -> None:
    """Serve on a listening socket of loopback until SIGTERM or SIGINT. `tenant_of`: the tenant of a
    token that the server accepts, as of `AcceptedTokens`; called in threads."""
    port = listening.getsockname()[1]
    config = uvicorn.Config(
        application(server, port, AcceptedTokens(tenant_of)),
        http=protocol_with(ServerLimits(connections=CONNECTIONS, connections_unknown=STRANGERS)),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
    )
    logging.getLogger("mcp").setLevel(logging.ERROR)  # any client can cause warnings
    # The HTTP server sends itself again the signal that ended it, when it is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


class _WithToken:
    """Refuses requests without a token, reads bodies within bounds, and notes the token."""

    def __init__(self, inner: ASGIApp, tokens: AcceptedTokens) -> None:
        self._inner, self._tokens = inner, tokens
        self._places = Places(REQUESTS, REQUESTS_OF_TENANT)
        self._awaited: OrderedDict[object, asyncio.Timeout] = OrderedDict()
        """Limits of the bodies that are awaited, the oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        token = _bearer(Headers(scope=scope).getlist("authorization"))
        if not token:
            refusal = _refusal(401, "a token is needed", "send Authorization: Bearer TOKEN")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        party = await self._tokens.party_of(token)
        if party is not None:
            accepted(scope, party)
        try:
            body = await self._body(receive, BODY_S if party else STRANGERS_BODY_S)
        except TimeoutError:
            late = _refusal(408, "the body did not arrive in time", "send it at once")
            await late(scope, receive, send)
            return
        if body is None:
            large = _refusal(413, "the body is too large", f"send at most {BODY_BYTES} bytes")
            await large(scope, receive, send)
            return
        with ExitStack() as held:
            if party is not None:
                try:
                    held.enter_context(self._places.place(party))
                except RefusedRequestError as error:
                    busy = _refusal(error.status, error.cause, error.remedy)
                    await busy(scope, receive, send)
                    return
            held.callback(_TOKEN.reset, _TOKEN.set(token))
            await self._inner(scope, _replayed(body, receive), send if party else _closing(send))

    async def _body(self, receive: Receive, seconds: float) -> bytes | None:
        """The whole body; None where it is too large. Raises TimeoutError where it does not come
        in time, or is the oldest of too many."""
        one = object()
        try:
            async with asyncio.timeout(seconds) as limit:
                self._awaited[one] = limit
                if len(self._awaited) > BODIES:
                    oldest = self._awaited.popitem(last=False)[1]
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await _body(receive)
        finally:
            self._awaited.pop(one, None)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What receives a body that was read already, then what comes after it."""
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if not replayed:
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _closing(send: Send) -> Send:
    """The connection is closed after the answer: its place is for others."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [one for one in message.get("headers", ()) if one[0].lower() != b"connection"]
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
        await send(message)

    return sending


def _bearer(given: list[str]) -> str:
    """The token of the one Authorization header; '' where there is none that can be used."""
    if len(given) != 1:
        return ""
    scheme, _, token = given[0].partition(" ")
    token = token.strip()
    fits = token.isascii() and token.isprintable() and len(token) <= _TOKEN_CHARS
    return token if scheme.lower() == "bearer" and fits and " " not in token else ""


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where it is too large."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the client has gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _refusal(status: int, cause: str, remedy: str) -> JSONResponse:
    # The rest of the request is not read, and the connection is free for others.
    return JSONResponse({"error": cause, "remedy": remedy}, status, {"Connection": "close"})


def _only_loopback(port: int) -> TransportSecuritySettings:
    """A page of another site cannot ask here, also where its name leads to loopback."""
    hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=hosts,
        allowed_origins=[f"http://{host}" for host in hosts],
    )
