# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles over gRPC: tokens, tenants and limits as over HTTP, with a real client."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import stat
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.unit.test_server_listen import write_certificate

from otlp_requests import request
from sonde.errors import UsageError
from sonde.server import answers, otlp_profiles
from sonde.server.addresses import Address, for_grpc, own_socket_path
from sonde.server.app import Api
from sonde.server.otlp_grpc import (
    HEAD_FIELDS,
    MESSAGE_BYTES,
    READ_OF_TENANT,
    GrpcReceiver,
    _host_of,
)
from sonde.server.otlp_ingest import sender_node
from sonde.server.parameters import parse
from sonde.server.service import ServerLimits, Service
from sonde.server.tokens import Caller, Scope
from sonde.store.flush import Flusher

PROFILES = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"
METRICS = "opentelemetry.proto.collector.metrics.v1.MetricsService"
BODY = request().SerializeToString()
Test = Callable[["Receiving"], Awaitable[None]]


class Receiving:
    """A receiver, and calls to it."""

    def __init__(self, service: Service, receiver: GrpcReceiver) -> None:
        self.service, self.receiver = service, receiver
        self.is_log_ended = False

    async def call(
        self,
        body: bytes = BODY,
        token: str = "",
        compression: grpc.Compression | None = None,
        service: str = PROFILES,
        credentials: grpc.ChannelCredentials | None = None,
        **metadata: str,
    ) -> tuple[str, str]:
        """(status, details) of an Export."""
        found = metadata | ({"authorization": f"Bearer {token}"} if token else {})
        target = self.receiver.target
        channel = (
            grpc.aio.secure_channel(
                target, credentials, [("grpc.ssl_target_name_override", "localhost")]
            )
            if credentials
            else grpc.aio.insecure_channel(target)
        )
        async with channel:
            export = channel.unary_unary(f"/{service}/Export")
            try:
                assert (
                    await export(
                        body,
                        metadata=[(name.replace("_", "-"), text) for name, text in found.items()],
                        compression=compression,
                        timeout=20,
                    )
                    == b""
                )
            except grpc.aio.AioRpcError as error:
                return error.code().name, error.details() or ""
        return "OK", ""

    def nodes(self, tenant: str = "default") -> dict[str, float]:
        """CPU time by node, of what is stored; ends the log."""
        if not self.is_log_ended:
            self.service.wal.close()
            self.is_log_ended = True
        Flusher(self.service.folder, self.service.catalog).flush()
        caller = Caller("test", tenant, frozenset(Scope))
        items = [("from", "1799990000"), ("to", "1800090000")]
        found = answers.ask(self.service, caller, answers.QUESTIONS["overview"], parse(items))
        return {row["node"]: row["cpu_ns"] for row in json.loads(found.content)}


def run(
    folder: Path, test: Test, is_open: bool = True, address: Address | None = None, **limits: Any
) -> None:
    """Run a test against a receiver."""
    service = Service(
        folder,
        ServerLimits(**limits),
        open_tenant="default" if is_open else "",
        flushes=False,
    )

    async def main() -> None:
        api = Api(service)
        at = address or Address("127.0.0.1", 0)
        receiver = GrpcReceiver(service, at, api.bodies, api.requests, api.otlp)
        await receiver.start()
        calls = Receiving(service, receiver)
        try:
            await test(calls)
        finally:
            await receiver.stop()
            if not calls.is_log_ended:
                service.close()
        assert not api.bodies._bytes and not api.bodies._held  # all is given back

    asyncio.run(main())


def test_profiles_are_stored_once_as_over_http(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        for compression in (None, grpc.Compression.Gzip, grpc.Compression.NoCompression):
            assert await to.call(compression=compression) == ("OK", "")
        (over_http,) = otlp_profiles.chunks(BODY, "", "", 1)
        ((_, is_new),) = to.service.take(
            Caller("open", "default", frozenset(Scope)), over_http.node, over_http.content
        )
        assert not is_new
        # What was compressed has another name: a client sends it again as it was.
        assert to.nodes() == {"pod-7": 2 * 10 * 52e6}

    run(tmp_path, test)


def test_without_a_host_the_node_is_the_one_that_is_named_or_sends(tmp_path: Path) -> None:
    made = request()
    del made.resource_profiles[0].resource.attributes[0]
    other = request(5)
    del other.resource_profiles[0].resource.attributes[0]

    async def test(to: Receiving) -> None:
        assert await to.call(made.SerializeToString()) == ("OK", "")
        assert await to.call(other.SerializeToString(), x_sonde_node="n1") == ("OK", "")
        assert to.nodes() == {socket.gethostname(): 10 * 52e6, "n1": 5 * 52e6}

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("peer", "host", "node"),
    [
        ("ipv4:10.0.0.7:4317", "10.0.0.7", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:4317", "2001:db8::1", "2001:db8::1"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "::ffff:10.0.0.7", "10.0.0.7"),
        ("ipv6:%5B::1%5D:1", "::1", socket.gethostname()),
        ("unix:", "127.0.0.1", socket.gethostname()),
        ("", "", ""),
    ],
)
def test_an_address_names_a_node(peer: str, host: str, node: str) -> None:
    assert _host_of(peer) == host
    assert sender_node(host) == node


def test_a_call_belongs_to_its_tokens_tenant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sonde.audit")

    async def test(to: Receiving) -> None:
        tokens = to.service.tokens
        _, mine = tokens.make("lab", [Scope.INGEST])
        _, reader = tokens.make("lab", [Scope.READ])
        number, revoked = tokens.make("lab", [Scope.INGEST])
        tokens.revoke(number)
        assert (await to.call(token=mine))[0] == "OK"
        for token in ("", "sonde_x", revoked):
            assert (await to.call(token=token))[0] == "UNAUTHENTICATED"
        assert (await to.call(token=reader))[0] == "PERMISSION_DENIED"
        lines = [json.loads(one.getMessage()) for one in caplog.records]
        assert [(one["status"], one["tenant"]) for one in lines] == [(401, "")] * 3 + [(403, "lab")]
        assert all(one["from"] == "127.0.0.1" and one["method"] == "gRPC" for one in lines)
        assert to.nodes("lab") == {"pod-7": 10 * 52e6}
        assert to.nodes("other") == {}

    run(tmp_path, test, is_open=False)


def test_who_has_no_token_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        async with grpc.aio.insecure_channel(to.receiver.target) as channel:
            call = channel.stream_unary(f"/{PROFILES}/Export")(timeout=20)  # it sends nothing
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(tmp_path, test, is_open=False)


def test_what_is_too_large_or_no_profile_is_refused(tmp_path: Path) -> None:
    bomb = bytes(64 << 20)

    async def test(to: Receiving) -> None:
        gz, deflate = grpc.Compression.Gzip, grpc.Compression.Deflate
        refused = {
            "large": await to.call(bytes(MESSAGE_BYTES + 1)),
            "bomb": await to.call(bomb, compression=gz),
            "bomb in bytes": await to.call(gzip.compress(bomb, 1)),
            "deflate": await to.call(BODY * 9, compression=deflate),
            "no profiles": await to.call(b"\xff" * 100),
            "cut gzip": await to.call(gzip.compress(BODY)[:-9]),
            "metrics": await to.call(b"", service=METRICS),
            "unknown": await to.call(b"", service="a.b.C"),
            "many metadata": await to.call(x_long="x" * 100_000),
        }
        assert {name: status for name, (status, _) in refused.items()} == {
            "large": "RESOURCE_EXHAUSTED",
            "bomb": "RESOURCE_EXHAUSTED",
            "bomb in bytes": "RESOURCE_EXHAUSTED",
            "deflate": "UNIMPLEMENTED",
            "no profiles": "INVALID_ARGUMENT",
            "cut gzip": "INVALID_ARGUMENT",
            "metrics": "UNIMPLEMENTED",
            "unknown": "UNIMPLEMENTED",
            "many metadata": "RESOURCE_EXHAUSTED",
        }
        assert "not stored" in refused["metrics"][1]
        assert (await to.call())[0] == "OK"

    run(tmp_path, test)


def test_a_call_has_at_most_a_hundred_fields_of_metadata(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        many = {f"x_{number}": "" for number in range(HEAD_FIELDS + 1)}
        status, details = await to.call(**many)
        assert (status, f"more than {HEAD_FIELDS} fields" in details) == (
            "RESOURCE_EXHAUSTED",
            True,
        )
        assert to.service.counters.refused == {"head": 1}
        assert await to.call(**dict(list(many.items())[: HEAD_FIELDS - 10])) == ("OK", "")

    run(tmp_path, test)


def test_what_is_decompressed_counts_as_the_tenants(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        assert await to.call(BODY) == ("OK", "")
        status, details = await to.call(gzip.compress(BODY))
        assert (status, "too much is sent at once" in details) == ("UNAVAILABLE", True)

    run(tmp_path, test, bodies_bytes=4 * MESSAGE_BYTES)


def test_a_slow_sender_is_ended_and_holds_up_no_other_tenant(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        (_, slow), (_, other) = (to.service.tokens.make(t, [Scope.INGEST]) for t in ("a", "b"))
        async with grpc.aio.insecure_channel(to.receiver.target) as channel:
            export = channel.stream_unary(f"/{PROFILES}/Export")
            metadata = [("authorization", f"Bearer {slow}")]
            calls = [export(metadata=metadata) for _ in range(READ_OF_TENANT + 2)]
            await asyncio.sleep(0.3)
            assert (await to.call(token=other))[0] == "OK"
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
                details = dict(ended.value.trailing_metadata() or ())["grpc-status-details-bin"]
                assert b"google.rpc.RetryInfo" in bytes(details)
        assert to.service.counters.refused["slow"] == len(calls)

    run(tmp_path, test, is_open=False, body_s=1.0)


def test_a_token_that_sends_too_much_is_asked_to_wait(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        statuses = [(await to.call())[0] for _ in range(15)]
        assert statuses[:10] == ["OK"] * 10 and statuses[-1] == "UNAVAILABLE"

    run(tmp_path, test, requests_a_second=1)


def test_a_client_that_gives_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(to: Receiving) -> None:
        async with grpc.aio.insecure_channel(to.receiver.target) as channel:
            call = channel.stream_unary(f"/{PROFILES}/Export")()
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.sleep(0.3)
        assert to.service.counters.refused == {"message": 1}

    run(tmp_path, test)


def test_a_call_is_answered_when_its_profiles_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a server that stops meanwhile finishes it, but takes no other."""
    waits, entered = threading.Event(), threading.Event()

    async def test(to: Receiving) -> None:
        original = otlp_profiles.chunks

        def slow(*arguments: Any) -> Any:
            entered.set()
            waits.wait(10)
            return original(*arguments)

        monkeypatch.setattr(otlp_profiles, "chunks", slow)
        call = asyncio.create_task(to.call())
        await asyncio.to_thread(entered.wait, 10)
        stopping = asyncio.create_task(to.receiver.stop())
        await asyncio.sleep(0.3)
        assert not call.done()
        assert (await to.call())[0] == "UNAVAILABLE"
        waits.set()
        assert await call == ("OK", "")
        await stopping
        assert to.nodes() == {"pod-7": 10 * 52e6}

    run(tmp_path, test)


def test_the_certificate_is_the_servers_and_is_read_again(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    write_certificate(certificate, key)

    async def test(to: Receiving) -> None:
        async def call(roots: bytes, pair: tuple[bytes, bytes] | None = None) -> str:
            mine, theirs = pair or (None, None)
            credentials = grpc.ssl_channel_credentials(roots, mine, theirs)
            async with asyncio.timeout(20):
                return (await to.call(credentials=credentials))[0]

        first = certificate.read_bytes()
        pair = (key.read_bytes(), first)
        assert await call(first, pair) == "OK"
        assert await call(first) == "UNAVAILABLE"  # without a certificate
        write_certificate(certificate, key)
        to.receiver.renew_certificate()
        second = certificate.read_bytes()
        # The authority of clients was read again, too: it is the same file here.
        assert await call(second, (key.read_bytes(), second)) == "OK"
        assert await call(first, pair) == "UNAVAILABLE"
        assert (await to.call())[0] == "UNAVAILABLE"  # without TLS

    address = Address("127.0.0.1", 0, certificate, key, certificate)
    run(tmp_path / "store", test, address=address)


def test_a_unix_socket_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "otlp.sock"
    with socket.socket(socket.AF_UNIX) as left:  # of a server that was killed
        left.bind(str(path))

    async def test(to: Receiving) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await to.call() == ("OK", "")
        with pytest.raises(UsageError, match="another process listens"):
            await asyncio.to_thread(own_socket_path, path)

    run(tmp_path / "store", test, address=Address(f"unix:{path}", 0))
    assert not path.exists()
    path.write_text("kept")
    with pytest.raises(UsageError, match="is no socket"):
        own_socket_path(path)
    with pytest.raises(UsageError, match="others can change"):
        own_socket_path(Path("/tmp/otlp.sock"))


def test_a_port_is_for_clients_with_a_certificate() -> None:
    plain = Address("127.0.0.1", 7373)
    for address in (plain, replace(plain, certificate=Path("c"), key=Path("k"))):
        with pytest.raises(UsageError, match="clients with a certificate"):
            for_grpc("127.0.0.1:4317", address)
    mutual = replace(plain, certificate=Path("c"), key=Path("k"), client_authority=Path("a"))
    assert for_grpc(":4317", mutual).port == 4317
    assert for_grpc("unix:/run/s.sock", plain).socket_path == Path("/run/s.sock")
    with pytest.raises(UsageError, match="no address"):
        for_grpc("unix:s.sock", plain)


def test_a_call_that_ends_grpcs_server_does_not_end_the_receiver(tmp_path: Path) -> None:
    """Its library reads the path of a call as UTF-8, outside of any handler."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": b"/\xff/Export", b":authority": b"x",
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(text)]) + text
        for name, text in fields.items()
    )

    def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
        return (
            struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content
        )

    async def test(to: Receiving) -> None:
        host, _, port = to.receiver.target.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 4, 1, head))
        await writer.drain()
        await asyncio.sleep(1)
        writer.close()
        ends_s = time.monotonic() + 20
        while await to.call() != ("OK", ""):
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.2)
        assert to.service.counters.refused["grpc"] >= 1

    run(tmp_path, test)


def test_a_port_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    service = Service(tmp_path, open_tenant="default", flushes=False)
    api = Api(service)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(UsageError, match="in use"):
            GrpcReceiver(service, address, api.bodies, api.requests, api.otlp)
    service.close()
