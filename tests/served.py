# SPDX-License-Identifier: Apache-2.0
"""A real `sonde serve` process for tests and benchmarks."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode


class Server:
    """A server on a directory, and requests to it."""

    def __init__(self, store: Path, *flags: str, token: str = "", keeps_port: bool = False) -> None:
        """`keeps_port`: each start listens where the first one did."""
        self.store, self._flags, self.token = store, flags, token
        self._keeps_port = keeps_port
        self.process: subprocess.Popen[str] | None = None
        self.port = 0
        atexit.register(self.kill)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start; returns the seconds until it accepts connections."""
        started = time.monotonic()
        flags = self._flags or ("--open",)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sonde", "serve", "--store", str(self.store)),
                *("--listen", f"127.0.0.1:{self.port if self._keeps_port else 0}", *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=(self.store.parent / "serve.log").open("a"),
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("serving "), (self.store.parent / "serve.log").read_text()
        self.port = int(line.rsplit(":", 1)[1])
        while True:
            try:
                self.get("/healthz")
                return time.monotonic() - started
            except OSError:
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(15)
            assert self.process.stdout
            self.process.stdout.close()
            self.process = None

    def get(self, path: str, **parameters: object) -> tuple[int, bytes]:
        """(status, body)."""
        query = f"?{urlencode(parameters, doseq=True)}" if parameters else ""
        return self._request("GET", path + query, b"", {})

    def ask(self, question: str, **parameters: object) -> Any:
        """The answer of a question."""
        status, body = self.get(f"/v1/{question}", **parameters)
        assert status == 200, body
        return json.loads(body)

    def send(self, node: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        """(status, answer) to chunks."""
        given = {"X-Sonde-Node": node} | {
            name.replace("_", "-"): text for name, text in headers.items()
        }
        status, answer = self._request("POST", "/v1/chunks", body, given)
        return status, json.loads(answer)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """(status, body)."""
        return self._request("POST", path, body, headers)

    def _request(
        self, method: str, target: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        if self.token:
            headers = headers | {"Authorization": f"Bearer {self.token}"}
        try:
            connection.request(method, target, body or None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def wait_for(self, chunks: int, deadline_s: float = 60) -> list[dict[str, Any]]:
        """The nodes, once all of that many chunks can be asked for."""
        ends = time.monotonic() + deadline_s
        while True:
            nodes: list[dict[str, Any]] = self.ask("nodes", **{"from": 0})
            found = sum(node["chunks"] for node in nodes)
            if found >= chunks or time.monotonic() > ends:
                return nodes
            time.sleep(0.3)
