# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server of the agent answers besides the page of metrics."""

from __future__ import annotations

import gzip
import http.client
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from sonde.sinks.prometheus import NothingNewError, PrometheusServer

PAGE = "# TYPE sonde_x gauge\n" + "".join(f'sonde_x{{n="{n}"}} {n}\n' for n in range(2_000))


@dataclass
class Agent:
    """What the server asks."""

    failure: str = ""
    pages: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    address: str = ""

    def page(self) -> str:
        if self.failure:
            raise NothingNewError(self.failure)
        self.pages += 1
        return PAGE

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(self.address, timeout=10)
        connection.request(
            "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body, {name.lower(): text for name, text in answer.getheaders()}


@pytest.fixture
def agent() -> Iterator[Agent]:
    one = Agent()
    server = PrometheusServer(
        "127.0.0.1:0", one.page, lambda name, n: one.lost.update({name: n}), lambda: one.failure
    )
    server.start()
    one.address = server.address
    yield one
    server.close()


def test_health_is_that_of_the_agent(agent: Agent) -> None:
    assert agent.get("/healthz")[:2] == (200, b"ok\n")

    agent.failure = "the agent has observed nothing for 61 s: its main loop is stuck"
    status, body, _ = agent.get("/healthz")
    assert (status, body.decode()) == (503, agent.failure + "\n")
    assert agent.get("/metrics")[0] == 503
    assert agent.pages == 0
    assert agent.lost == {"scrapes refused": 1}


def test_the_index_links_what_there_is(agent: Agent) -> None:
    status, body, headers = agent.get("/")

    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    for path in (b"/metrics", b"/healthz"):
        assert b'href="%s"' % path in body
    assert agent.get("/index.html")[0] == 404


@pytest.mark.parametrize("accepted", ["gzip", "deflate, gzip;q=0.8", "GZIP, identity"])
def test_pages_are_compressed_where_that_is_accepted(agent: Agent, accepted: str) -> None:
    status, body, headers = agent.get("/metrics", Accept_Encoding=accepted)

    assert status == 200
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(body).decode() == PAGE
    assert len(body) < len(PAGE) / 4


@pytest.mark.parametrize("accepted", ["identity", "gzip;q=0", "gzip; q=0.00, deflate", "br"])
def test_and_plain_where_it_is_not(agent: Agent, accepted: str) -> None:
    status, body, headers = agent.get("/metrics", Accept_Encoding=accepted)

    assert (status, body.decode()) == (200, PAGE)
    assert "content-encoding" not in headers


def test_both_kinds_of_clients_get_one_page(agent: Agent) -> None:
    plain = agent.get("/metrics", Accept_Encoding="identity")[1]
    packed = agent.get("/metrics", Accept_Encoding="gzip")[1]

    assert gzip.decompress(packed) == plain
    assert agent.pages == 1


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9400", "127.0.0.1.evil.example"])
def test_a_page_of_another_site_reads_nothing_under_its_name(agent: Agent, host: str) -> None:
    """Its name resolves to our address, and a browser on the node asks us (DNS rebinding)."""
    for path in ("/metrics", "/healthz", "/"):
        status, body, _ = agent.get(path, Host=host)
        assert (status, body) == (421, b"")
    assert agent.pages == 0


@pytest.mark.parametrize("host", ["localhost:9400", "LOCALHOST", "127.0.0.1:9400", "[::1]:9400"])
def test_programs_of_the_node_read_it_under_its_names(agent: Agent, host: str) -> None:
    assert agent.get("/metrics", Host=host)[0] == 200


def test_where_all_may_connect_a_name_is_no_reason(agent: Agent) -> None:
    """As a service of Kubernetes has one."""
    server = PrometheusServer("0.0.0.0:0", agent.page)
    server.start()
    agent.address = "127.0.0.1:" + server.address.rpartition(":")[2]
    try:
        assert agent.get("/metrics", Host="sonde.monitoring.svc:9400")[0] == 200
    finally:
        server.close()
