# SPDX-License-Identifier: Apache-2.0
"""`sonde mcp --listen` under the MCP library's own client over HTTP, with tokens of two tenants."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult
from test_mcp import NODE, Tenants, answer

from sonde.mcp import http as http_limits
from sonde.mcp.server import NAMES

ALL_TIME = {"start": "1", "end": "4000000000"}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    tenants = Tenants(tmp_path_factory.mktemp("mcp-http"))
    with tenants.server:
        tenants.fill()
        yield tenants


@pytest.fixture(scope="module")
def port(tenants: Tenants) -> Iterator[int]:
    """Of one `sonde mcp` for all tenants."""
    url = f"http://127.0.0.1:{tenants.server.port}"
    flags = ["--server", url, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sonde", "mcp", *flags], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:") and line.endswith("/mcp\n"), line
        yield int(line.rsplit(":", 1)[1].removesuffix("/mcp\n"))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        process.stdout.close()


def with_client(port: int, token: str, use: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http_client,
            Client(
                streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http_client),
                read_timeout_seconds=60,
            ) as client,
        ):
            return await use(client)

    return asyncio.run(run())


async def overview(client: Client) -> CallToolResult:
    return await client.call_tool("overview", ALL_TIME)


def test_the_tools_answer_over_http(tenants: Tenants, port: int) -> None:
    async def use(client: Client) -> tuple[Any, CallToolResult]:
        return (await client.list_tools()).tools, await overview(client)

    tools, found = with_client(port, tenants.lab.read_text(), use)
    assert [tool.name for tool in tools] == [*NAMES]
    assert NODE in {node["node"] for node in answer(found)["data"]}


def test_each_request_sees_the_tenant_of_its_token(tenants: Tenants, port: int) -> None:
    """Many clients of two tenants at once, of one process."""
    tokens = [tenants.lab.read_text(), tenants.other.read_text()] * 4

    async def one(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http_client,
            Client(
                streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http_client),
                read_timeout_seconds=60,
            ) as client,
        ):
            return len(answer(await overview(client))["data"])

    async def every() -> list[int]:
        return await asyncio.gather(*map(one, tokens))

    assert asyncio.run(every()) == [2, 0] * 4


@pytest.mark.parametrize(("which", "cause"), [("ingest", "not for read"), ("", "HTTP status 401")])
def test_a_token_that_may_not_read_gets_no_answer(
    tenants: Tenants, port: int, which: str, cause: str
) -> None:
    token = tenants.ingest.read_text() if which else "nobody's"
    found = with_client(port, token, overview)
    assert found.is_error and cause in found.content[0].text


def request(port: int, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", "/mcp", body, {"Content-Type": "application/json"} | given)
        found = connection.getresponse()
        raw = found.read()
        return found.status, json.loads(raw) if raw[:1] == b"{" else {}
    finally:
        connection.close()


def test_hostile_requests_are_refused(tenants: Tenants, port: int) -> None:
    bearer = f"Bearer {tenants.lab.read_text()}"
    accepts = "application/json, text/event-stream"
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "overview", "arguments": ALL_TIME},
    }
    body = json.dumps(call).encode()
    assert request(port, body, Accept=accepts)[0] == 401
    assert request(port, body, Accept=accepts, Authorization="Basic YTpi")[0] == 401
    assert request(port, b" " * (64 << 10) + body, Accept=accepts, Authorization=bearer)[0] == 413
    # A page of another site, by the name that it has let lead to loopback.
    foreign = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert request(port, body, Accept=accepts, Authorization=bearer, **foreign)[0] in (403, 421)
    assert request(port, b"{", Accept=accepts, Authorization=bearer)[0] == 400
    status, found = request(port, body, Accept=accepts, Authorization=bearer)
    assert status == 200 and not found["result"].get("isError"), found


def test_a_body_that_drips_is_given_up(tenants: Tenants, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000\r\n"
        sock.sendall(f"{head}Authorization: Bearer {tenants.lab.read_text()}\r\n\r\n{{".encode())
        started = time.monotonic()
        assert sock.recv(100).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 20


LIST = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}).encode()


def without_body(port: int, token: str) -> socket.socket:
    """A connection with the head of a request, whose body does not come."""
    one = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 60000\r\n"
    one.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n{{".encode())
    return one


def test_bodies_that_do_not_come_keep_nobody_out(tenants: Tenants, port: int) -> None:
    """Without a valid token, a few connections at a time; with one, half of all."""
    token = tenants.lab.read_text()
    for held_with in ("x", token):
        held = [without_body(port, held_with) for _ in range(http_limits.CONNECTIONS)]
        try:
            for _ in range(5):
                status, found = request(
                    port, LIST, Accept="application/json, text/event-stream",
                    Authorization=f"Bearer {token}",
                )  # fmt: skip
                assert status == 200 and found["result"]["tools"]
        finally:
            for one in held:
                one.close()


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--listen", "0.0.0.0:0"], "not this machine's loopback"),
        (["--listen", "127.0.0.1:0", "--token-file", "/dev/null"], "exclude each other"),
    ],
)
def test_nobody_lends_a_token_or_listens_to_the_network(flags: list[str], cause: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sonde", "mcp", *flags], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and cause in done.stderr, done
