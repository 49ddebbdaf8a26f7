# SPDX-License-Identifier: Apache-2.0
"""Metrics pushed over OTLP: to a real OpenTelemetry collector, and to one that is not there."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nvml_stub import Stub
from sonde.errors import UsageError
from sonde.metrics import catalogue, labels
from sonde.sinks.otlp import OtlpPusher, endpoint_of
from sonde.sinks.series import MetricRegistry

COLLECTOR = Path(__file__).parents[2] / "build/tools/otelcol"
WAIT_S = 60


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(ask):
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if found := ask():
            return found
        time.sleep(0.2)
    raise AssertionError("nothing came")


@pytest.fixture
def collector(tmp_path):
    """(its URL, the file that holds what it received)."""
    if not COLLECTOR.exists():
        pytest.skip("needs scripts/otel_collector, which takes minutes and Go 1.23 or newer")
    port = free_port()
    config = tmp_path / "collector.yaml"
    config.write_text(
        "receivers:\n  otlp:\n    protocols:\n      http:\n"
        f"        endpoint: 127.0.0.1:{port}\n"
        "exporters:\n  debug:\n    verbosity: detailed\n"
        "service:\n  telemetry:\n    metrics:\n      level: none\n"
        "  pipelines:\n    metrics:\n      receivers: [otlp]\n      exporters: [debug]\n"
    )
    log = tmp_path / "collector.log"
    with log.open("w") as out:
        process = subprocess.Popen([COLLECTOR, f"--config={config}"], stdout=out, stderr=out)
        try:
            wait_for(lambda: "Everything is ready" in log.read_text())
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            process.wait()


@pytest.mark.bpf
def test_a_real_collector_receives_an_agents_metrics(collector, tmp_path):
    url, log = collector
    stub = Stub(tmp_path)
    stub.set_answers(power=321000, processes=f"{os.getpid()}:1048576:50")
    environment = stub.environment | {"SONDE_OTLP_PERIOD_S": "1"}
    agent = subprocess.Popen(
        [sys.executable, "-m", "sonde", "agent", "--otlp", url],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: "Name: hw.power" in log.read_text())
        wait_for(lambda: "Name: sonde.process.gpu.memory" in log.read_text())
    finally:
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0
    text = log.read_text()
    power = re.search(r"Name: hw.power\n(?:.*\n){0,20}?Value: ([\d.]+)", text)
    assert power and float(power[1]) == 321
    unit = re.search(r"Name: hw.power\n.*\n +-> Unit: (\S+)\n +-> DataType: (\S+)", text)
    assert unit and unit.groups() == ("W", "Gauge")
    total = re.search(
        r"Name: hw.energy\n.*\n +-> Unit: J\n +-> DataType: Sum\n +-> IsMonotonic: true\n"
        r" +-> AggregationTemporality: Cumulative",
        text,
    )
    assert total
    assert "service.name: Str(sonde)" in text
    assert f"host.name: Str({os.uname().nodename})" in text
    assert not re.search(r"-> process\.pid:", text)
    names = set(re.findall(r"-> Name: (\S+)", text))
    assert names <= set(catalogue())


# ---- the pusher alone ----


class Receiver:
    """An HTTP server that answers as it is set to; a stand-in for a collector that misbehaves."""

    def __init__(self):
        self.status = 200
        self.bodies = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.bodies.append((self.path, json.loads(gzip.decompress(body))))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def pusher(url):
    board = MetricRegistry()
    board.record([(time.monotonic_ns(), "hw.power", labels(hw__id="GPU-1"), 300.0)])
    return OtlpPusher(url, 3600, board.families, {"service.name": "sonde"})


def test_a_push_is_what_the_protocol_prescribes(receiver):
    pushing = pusher(receiver.url)
    pushing.push()
    assert (pushing.pushed, pushing.failed) == (1, 0)
    ((path, body),) = receiver.bodies
    assert path == "/v1/metrics"
    (resource,) = body["resourceMetrics"]
    metrics = {one["name"]: one for one in resource["scopeMetrics"][0]["metrics"]}
    (point,) = metrics["hw.power"]["gauge"]["dataPoints"]
    assert point["asDouble"] == 300.0
    assert point["attributes"] == [{"key": "hw.id", "value": {"stringValue": "GPU-1"}}]
    assert abs(int(point["timeUnixNano"]) - time.time_ns()) < 60e9


def test_failures_are_counted_and_nothing_piles_up(receiver):
    pushing = pusher(receiver.url)
    receiver.status = 503
    pushing.push()
    assert (pushing.pushed, pushing.failed) == (0, 1)
    assert "503" in pushing.error
    nobody = pusher(f"http://127.0.0.1:{free_port()}")
    nobody.push()
    assert (nobody.failed, len(receiver.bodies)) == (1, 1)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/", "http://c:4318/v1/metrics"),
        ("https://c/otlp/v1/metrics", "https://c/otlp/v1/metrics"),
    ],
)
def test_the_path_is_added_where_there_is_none(url, endpoint):
    assert endpoint_of(url) == endpoint


@pytest.mark.parametrize("url", ["", "c:4318", "ftp://c", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UsageError):
        endpoint_of(url)
