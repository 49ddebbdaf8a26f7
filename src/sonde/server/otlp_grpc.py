# SPDX-License-Identifier: Apache-2.0
"""OTLP over gRPC: profiles as over HTTP, by the same tokens, limits of bodies and audit log.

gRPC's library would decompress messages without a limit, and would read them before it is known who
sends them. So it hands them over compressed, and each is read when its caller is known and has a
turn; until then HTTP/2's flow control holds it back. Protocol: OTLP 1.x, "OTLP/gRPC".
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # any client can cause its lines on stderr

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2

from sonde.errors import SondeError, UsageError
from sonde.server.addresses import Address, own_socket_path
from sonde.server.admission import Bodies, RequestLog
from sonde.server.otlp_ingest import OtlpIngest, sender_node
from sonde.server.service import LOG, RefusedRequestError, Service
from sonde.server.tokens import Caller, Scope
from sonde.server.turns import Turns
from sonde.store.wal import WalBusyError, WalFailedError

MESSAGE_BYTES = 4 << 20
"""Of a message, compressed or not."""
HEAD_BYTES = 16 << 10
"""Most bytes of a call's metadata, as by gRPC's own default. Its library counts 32 more for each
field, and makes a Python object of each before we see how many there are: 3 ms of 1,700."""
HEAD_FIELDS = 100
"""Most fields of it, as over HTTP. Its library has no limit for that."""
STREAMS = 32
"""Most calls of one connection that are not answered yet."""
CALLS, CALLS_OF_TENANT, READ_OF_TENANT = 256, 64, 8
"""Calls that wait or are served, those of one tenant, and those of which its messages are read at a
time: each may take `MESSAGE_BYTES`."""
IDLE_S, PING_S, PONG_S = 60, 60, 20
"""A connection without a call is closed after this; one that does not answer a ping, too."""
AGAIN_S = 1.0
"""From a fault of gRPC's library until it listens again."""
STOP_S = 5.0
"""Calls that are served when the server stops have this long."""
_IDENTITY_AND_GZIP = 0b101
"""Bits of grpc_compression_algorithm: others are refused as UNIMPLEMENTED."""
_GZIP = b"\x1f\x8b"
"""A gzip stream begins so. A message of protobuf cannot: there is no such wire type."""
_SERVICES = {
    signal: f"opentelemetry.proto.collector.{signal}.{version}.{signal.title()}Service"
    for signal, version in (
        ("profiles", "v1development"), ("metrics", "v1"), ("logs", "v1"), ("trace", "v1"),
    )
}  # fmt: skip
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    408: grpc.StatusCode.UNAVAILABLE,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""By HTTP status. OTLP has clients send again what was UNAVAILABLE, and what was RESOURCE_EXHAUSTED
only where the answer states when."""


def _retry_details(code: int, after_s: int) -> bytes:
    """A google.rpc.Status with a google.rpc.RetryInfo, as grpc-status-details-bin has it."""
    delay = duration_pb2.Duration(seconds=after_s).SerializeToString()
    info = any_pb2.Any(
        type_url="type.googleapis.com/google.rpc.RetryInfo",
        value=bytes([0x0A, len(delay)]) + delay,  # field 1: retry_delay
    ).SerializeToString()
    return bytes([0x08, code, 0x1A, len(info)]) + info  # fields 1 and 3: code, details


class GrpcReceiver:
    """Receives OTLP over gRPC. Made before the event loop runs, then used in it."""

    def __init__(
        self,
        service: Service,
        address: Address,
        bodies: Bodies,
        requests: RequestLog,
        ingest: OtlpIngest,
    ) -> None:
        """Takes the port, and listens when `start` is called. Raises UsageError for an address or
        certificate that cannot be used."""
        self._service, self._address, self._limits = service, address, service.limits
        self._bodies, self._requests, self._ingest = bodies, requests, ingest
        self._turns = Turns(READ_OF_TENANT, CALLS, CALLS_OF_TENANT)
        self._taking: set[asyncio.Task[None]] = set()
        self._server: Any = None
        self._certificate = self._certificate_now()
        self._renewed: Any = None
        """A certificate that new connections get from now on."""
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._held: socket.socket | None = None
        self.target = address.host
        """Where it receives: HOST:PORT or unix:PATH."""
        if address.socket_path is not None:
            own_socket_path(address.socket_path)
            return
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._held = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._held.bind((address.host, address.port))
        except OSError as error:
            self._held.close()
            raise UsageError(
                f"cannot listen on {address.host}:{address.port}: {error.strerror}",
                "choose another --otlp-grpc",
            ) from error
        host = f"[{address.host}]" if family == socket.AF_INET6 else address.host
        self.target = f"{host}:{self._held.getsockname()[1]}"

    async def start(self) -> None:
        """Begin to receive, and go on where gRPC's library ends by a fault. Raises UsageError where
        the address cannot be used."""
        logging.getLogger("grpc").setLevel(logging.CRITICAL)  # any client can cause its lines
        await self._listen()
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Listen again whenever gRPC's library has stopped by itself."""
        while True:
            with suppress(Exception):  # that of the call which ended it
                await self._server.wait_for_termination()
            if self._stopping.is_set():
                return
            self._service.counters.refuse("grpc")
            LOG.error("OTLP over gRPC ended by a fault of its library; it begins again")
            await asyncio.sleep(AGAIN_S)
            try:
                if (path := self._address.socket_path) is not None:
                    own_socket_path(path)
                await self._listen()
            except UsageError as error:
                LOG.error("%s", error.cause)

    async def _listen(self) -> None:
        limits = self._limits
        server = grpc.aio.server(
            maximum_concurrent_rpcs=2 * CALLS,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.per_message_decompression", 0),
                ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_AND_GZIP),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_metadata_size", HEAD_BYTES),
                ("grpc.absolute_max_metadata_size", HEAD_BYTES),
                ("grpc.max_concurrent_streams", STREAMS),
                # Unread calls hold a window each, which would grow with the bandwidth.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_allowed_incoming_connections", limits.connections_grpc),
                ("grpc.server_handshake_timeout_ms", round(1000 * limits.head_s)),
                ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
                ("grpc.keepalive_time_ms", 1000 * PING_S),
                ("grpc.keepalive_timeout_ms", 1000 * PONG_S),
            ],
        )
        handlers = {
            signal: grpc.method_handlers_generic_handler(
                name, {"Export": grpc.stream_unary_rpc_method_handler(self._handler(signal))}
            )
            for signal, name in _SERVICES.items()
        }
        server.add_generic_rpc_handlers(tuple(handlers.values()))
        self.close()
        before = os.umask(0o177)  # of a Unix socket: for this user alone
        try:
            if self._certificate is None:
                server.add_insecure_port(self.target)
            else:
                server.add_secure_port(
                    self.target,
                    grpc.dynamic_ssl_server_credentials(
                        self._certificate,
                        self._newer_certificate,
                        self._address.client_authority is not None,
                    ),
                )
        except RuntimeError as error:
            raise UsageError(
                f"cannot receive OTLP on {self.target}: {error}", "choose another --otlp-grpc"
            ) from error
        finally:
            os.umask(before)
        await server.start()
        self._server = server  # not before: one that never ran never ends

    async def stop(self) -> None:
        """Take no more calls; those that are served end within some seconds."""
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(STOP_S)
        if self._keeper is not None:  # cancelled, it would cancel what the library waits for, too
            await asyncio.wait([self._keeper], timeout=STOP_S)
        if self._taking:
            await asyncio.wait(self._taking, timeout=STOP_S)
        if self._server is not None and (path := self._address.socket_path) is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the port, where it was not started."""
        if self._held is not None:
            self._held.close()

    def renew_certificate(self) -> None:
        """Read certificate and key again, for new connections. Raises UsageError."""
        self._renewed = self._certificate_now()

    def _certificate_now(self) -> Any:
        address = self._address
        if address.certificate is None or address.key is None:
            return None
        try:
            pair = (address.key.read_bytes(), address.certificate.read_bytes())
            authority = address.client_authority.read_bytes() if address.client_authority else None
        except OSError as error:
            raise UsageError(
                f"the certificate cannot be used: {error}", "check --certificate and --key"
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def _newer_certificate(self) -> Any:
        """What gRPC asks for, in a thread, with each new connection; None: there is no other."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _handler(self, signal: str) -> Callable[[Any, Any], Awaitable[bytes]]:
        async def export(_messages: Any, context: Any) -> bytes:
            started = time.monotonic()
            caller, refused, status = None, None, 500
            host = _host_of(context.peer())
            try:
                metadata = self._metadata(context)
                caller = await self._caller(metadata)
                await self._take(signal, caller, context, metadata, host)
                return b""
            except RefusedRequestError as error:
                # Else what is kept refers to this frame, and to what was decoded.
                refused, status = error.with_traceback(None), error.status
            except (WalBusyError, WalFailedError) as error:
                self._service.counters.refuse("disk")
                refused, status = RefusedRequestError(503, error.cause, error.remedy), 503
            except SondeError as error:
                refused, status = RefusedRequestError(400, error.cause, error.remedy), 400
            except asyncio.CancelledError:  # the client is gone, or gave up
                self._service.counters.refuse("gone")
                raise
            except Exception:
                self._requests.failed(f"gRPC {_SERVICES[signal]}")
                refused = RefusedRequestError(500, "the server has a defect", "see its log")
            if self._requests.may_note_refusal(caller):
                about = {
                    "method": "gRPC",
                    "path": f"/{_SERVICES[signal]}/Export",
                    "status": status,
                    "ms": round(1000 * (time.monotonic() - started), 1),
                    "from": host,
                    "why": refused.cause,
                }
                self._requests.note(caller, about)
            return await _abort(context, refused)

        return export

    def _metadata(self, context: Any) -> dict[str, Any]:
        """What of a call's metadata is used, by name; of one that is repeated, the last. Raises
        RefusedRequestError where it has too many fields."""
        fields = context.invocation_metadata() or ()
        if len(fields) > HEAD_FIELDS:
            self._service.counters.refuse("head")
            raise RefusedRequestError(
                413, f"more than {HEAD_FIELDS} fields of metadata", "send fewer"
            )
        return {name: text for name, text in fields if name in ("authorization", "x-sonde-node")}

    async def _caller(self, metadata: dict[str, Any]) -> Caller:
        """The caller. Raises RefusedRequestError without a valid token."""
        try:
            caller = await self._service.authenticated(str(metadata.get("authorization", "")))
        except RefusedRequestError:
            self._service.counters.refuse("issuer")
            raise
        if caller is None:
            raise RefusedRequestError(
                401, "no valid token", "send the metadata authorization: Bearer TOKEN"
            )
        return caller

    async def _take(
        self, signal: str, caller: Caller, context: Any, metadata: dict[str, Any], host: str
    ) -> None:
        """Read and store what a call sends. Raises as `OtlpIngest.take`."""
        if Scope.INGEST not in caller.scopes:
            raise RefusedRequestError(
                403, f"this token is not for {Scope.INGEST}", "use another token"
            )
        if signal != "profiles":
            raise RefusedRequestError(501, f"{signal} of others are not stored", "send profiles")
        tenant = caller.tenant
        with self._turns.place(tenant), self._bodies.place(tenant):
            try:
                async with asyncio.timeout(self._limits.body_s), self._turns.turn(tenant):
                    body = await self._message(context, tenant)
                    node = str(metadata.get("x-sonde-node", "")) or sender_node(host)
                    task = asyncio.create_task(self._stored(caller, body, node))
                    self._taking.add(task)
                    task.add_done_callback(self._taken)
            except TimeoutError:
                self._service.counters.refuse("slow")
                raise RefusedRequestError(
                    408, "the message came too slowly", "send it again"
                ) from None
            # It goes on where the client is gone: the thread that decodes it does, too.
            await asyncio.shield(task)

    async def _message(self, context: Any, tenant: str) -> bytes:
        """The message of a call; its size must be given back. Raises RefusedRequestError."""
        held = MESSAGE_BYTES
        try:
            self._bodies.charge(tenant, MESSAGE_BYTES)
            body: Any = await context.read()
            if not isinstance(body, bytes):  # too large, which gRPC answers by itself, or cut
                self._service.counters.refuse("message")
                raise RefusedRequestError(
                    413,
                    f"no whole message of at most {MESSAGE_BYTES >> 20} MiB",
                    "send it again, or less",
                )
            held -= len(body)
            return body
        finally:
            self._bodies.give_back(tenant, held)

    def _taken(self, task: asyncio.Task[None]) -> None:
        self._taking.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or is gone

    async def _stored(self, caller: Caller, body: bytes, node: str) -> None:
        try:
            self._service.admit(caller, len(body))
            encoding = "gzip" if body.startswith(_GZIP) else "identity"
            await self._ingest.take(caller, body, encoding, node)
        finally:
            self._bodies.give_back(caller.tenant, len(body))


async def _abort(context: Any, refused: RefusedRequestError) -> bytes:
    """End a call with a refusal."""
    code = _STATUS.get(refused.status)
    if code is None:
        code = grpc.StatusCode.UNIMPLEMENTED if refused.status == 501 else grpc.StatusCode.INTERNAL
    trailing: tuple[tuple[str, bytes], ...] = ()
    if code is grpc.StatusCode.UNAVAILABLE:
        after_s = int(refused.headers.get("Retry-After", 1))
        trailing = (("grpc-status-details-bin", _retry_details(code.value[0], after_s)),)
    text = f"{refused.cause}; {refused.remedy}" if refused.remedy else refused.cause
    await context.abort(code, text, trailing)
    return b""


def _host_of(peer: str) -> str:
    """The address in what gRPC calls a peer: ipv4:127.0.0.1:1, ipv6:%5B::1%5D:1, unix:."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
