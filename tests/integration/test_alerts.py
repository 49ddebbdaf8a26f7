# SPDX-License-Identifier: Apache-2.0
"""Alerts of a real server over a capture of a real GPU: a webhook, and Debian's Alertmanager."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

from served import Server
from sonde.query import framing
from stored_chunks import as_of, meta_of

CAPTURE = Path(__file__).parents[1] / "data" / "explain" / "own" / "cpu_quota.sonde"
MANAGER = shutil.which("prometheus-alertmanager")
RANGE_S = 20
RULES = """
interval_s = 1.0
webhook = "http://127.0.0.1:{hook}/direct"
alertmanager = "http://127.0.0.1:{manager}"
page = "https://sonde.example"

[[rules]]
name = "WaitsForCpu"
question = "names"
select = {{kind = "runqueue", node = "trainer-0"}}
value = "ns"
reduce = "sum"
above = 1e6
range_s = {range}.0
labels = {{severity = "page"}}
annotations = {{summary = "{{value}} ns in run queues"}}

[[rules]]
name = "CpuBound"
question = "verdict"
select = {{node = "trainer-0"}}
rows = "verdicts"
where = {{"bounds.0.key" = "cpu contention"}}
by = {{thread = "device_name"}}
value = "bounds.0.share"
above = 0.5
for_s = 3600.0
range_s = 60.0

[[rules]]
name = "OfAnotherTenant"
tenant = "other"
question = "nodes"
reduce = "count"
above = 0.0
"""


@contextmanager
def hook() -> Iterator[tuple[int, list[tuple[str, Any]]]]:
    """(port, what was posted: path and body)."""
    got: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port, got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def alertmanager(folder: Path, receiver: int) -> Iterator[int]:
    """The port of a real Alertmanager that posts to a receiver; 9 where there is none."""
    if MANAGER is None:
        yield 9
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "alertmanager.yml"
    config.write_text(
        "route: {receiver: hook, group_wait: 0s, group_interval: 1s, repeat_interval: 1h}\n"
        "receivers: [{name: hook, webhook_configs: "
        f'[{{url: "http://127.0.0.1:{receiver}/manager", send_resolved: true}}]}}]\n'
    )
    process = subprocess.Popen(
        [MANAGER, f"--config.file={config}", f"--storage.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="],
        stdout=(folder / "alertmanager.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        until(lambda: answers(port), 20)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2).close()
    except OSError:
        return False
    return True


def until(holds: Callable[[], Any], deadline_s: float) -> Any:
    ends = time.monotonic() + deadline_s
    while not (found := holds()):
        assert time.monotonic() < ends
        time.sleep(0.1)
    return found


def send_now(server: Server) -> None:
    """The capture, as one that ends now."""
    content = CAPTURE.read_bytes()
    at = framing.FILE_HEADER.size
    chunks = []
    for chunk in framing.chunks(BytesIO(content), len(content)):
        assert isinstance(chunk, framing.RawChunk)
        chunks.append(content[at : chunk.end])
        at = chunk.end
    ends = [meta_of(chunk)["end_ns"] for chunk in chunks]
    now_ns = time.time_ns()
    for seq, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        server.send("trainer-0", as_of(chunk, "now", seq, now_ns - (ends[-1] - end)))


def of(got: list[tuple[str, Any]], path: str) -> list[Any]:
    return [body for where, body in got if where == path]


def test_a_rule_fires_once_survives_a_kill_and_resolves(tmp_path: Path) -> None:
    store, rules = tmp_path / "store", tmp_path / "rules.toml"
    with hook() as (port, got), alertmanager(tmp_path, port) as manager:
        rules.write_text(RULES.format(hook=port, manager=manager, range=RANGE_S))
        rules.chmod(0o600)
        with Server(store, "--open", "--alerts", str(rules), keeps_port=True) as server:
            send_now(server)

            def alerts() -> dict[str, Any]:
                found = server.ask("alerts")
                return {one["labels"]["alertname"]: one for one in found["alerts"]}

            until(lambda: len(alerts()) == 2, 15)
            (fired,) = until(lambda: of(got, "/direct"), 10)
            shown = subprocess.run(
                [*(sys.executable, "-m", "sonde", "alerts", "check", str(rules)),
                 *("--store", str(store))],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            if MANAGER:
                (first, *_) = until(lambda: of(got, "/manager"), 10)
                api = f"http://127.0.0.1:{manager}/api/v2/alerts"
                (seen,) = json.load(urllib.request.urlopen(api, timeout=5))
            before = alerts()
            server.kill()
            server.start()
            after = alerts()
            status, metrics = server.get("/metrics")
            until(lambda: alerts()["WaitsForCpu"]["status"] == "resolved", RANGE_S + 15)
            until(lambda: len(of(got, "/direct")) > 1, 10)
            if MANAGER:
                until(lambda: of(got, "/manager")[-1]["status"] == "resolved", 15)
            time.sleep(2.5)

    assert fired["status"] == "firing" and fired["kind"] == "alert"
    assert fired["labels"] == {"alertname": "WaitsForCpu", "tenant": "default", "severity": "page"}
    assert 1e8 < fired["value"] < 2e10  # the less, the later it is evaluated
    assert fired["annotations"]["summary"].endswith(" ns in run queues")
    assert fired["page"].startswith("https://sonde.example/?from=")
    assert before["CpuBound"]["status"] == "pending"
    assert before["CpuBound"]["labels"]["thread"] == "python3 (1097)"
    assert {name: one["since"] for name, one in after.items()} == {
        name: one["since"] for name, one in before.items()
    }
    assert [one["status"] for one in of(got, "/direct")] == ["firing", "resolved"]
    assert status == 200 and b'sonde_server_alerts{state="firing"} 1' in metrics
    assert "ALERT  0.5" in shown and "thread=python3 (1097)" in shown and "OfAnotherTenant" in shown
    if MANAGER:
        assert seen["status"]["state"] == "active"
        assert seen["labels"] == fired["labels"] and seen["annotations"] == fired["annotations"]
        assert seen["generatorURL"] == fired["page"]
        assert first["status"] == "firing"
        assert len([one for one in of(got, "/manager") if one["status"] == "firing"]) == 1


def test_a_bad_file_is_named_before_the_server_starts(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\nname = "A"\nquestion = "top"\nvalue = "cpu"\nabove = 1.0\n')
    for command in (["serve", "--store", str(tmp_path), "--alerts"], ["alerts", "check"]):
        done = subprocess.run(
            [sys.executable, "-m", "sonde", *command, str(rules)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "rule 1 ('A'): value: top has no field 'cpu'" in done.stderr
        assert "remedy: use one of binary, function, own_ns, total_ns" in done.stderr
