# SPDX-License-Identifier: Apache-2.0
"""Processes around victims: culprits, clients, a backend.

python bench/faults/peers.py KIND [ARGUMENT…]
"""

from __future__ import annotations

import array
import http.client
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SETTING: dict[str, float] = {}
ANSWERS = array.array("Q")


def burn() -> None:
    """One CPU, all the time."""
    count = 0
    while True:
        count += 1


def disk(path: str, kilobytes: str) -> None:
    """Reads and writes past the page cache, several at a time."""
    size = int(kilobytes) << 10
    for _ in range(4):
        threading.Thread(target=_disk, args=(path, size), daemon=True).start()
    threading.Event().wait()


def _disk(path: str, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    block = mmap.mmap(-1, size)
    pieces = Path(path).stat().st_size // size
    while True:
        offset = random.randrange(pieces) * size
        if random.random() < 0.5:
            os.pwritev(fd, [block], offset)
        else:
            os.preadv(fd, [block], offset)


def client(address: str, rate: str, answers_file: str) -> None:
    """Asks at random times, `rate` times a second; a line on standard input sets another rate. At
    SIGTERM it writes when each request was due and when it was answered (CLOCK_MONOTONIC, ns)."""
    SETTING["rate"] = float(rate)
    signal.signal(signal.SIGTERM, lambda *_: _write(Path(answers_file)))
    threading.Thread(target=_obey, daemon=True).start()
    for _ in range(4):
        threading.Thread(target=_ask, args=(address,), daemon=True).start()
    threading.Event().wait()


def _write(path: Path) -> None:
    path.write_bytes(ANSWERS.tobytes())
    os._exit(0)


def _ask(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=30)
    due = time.monotonic()
    while True:
        due = max(due + random.expovariate(SETTING["rate"] / 4), time.monotonic() - 0.5)
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if connection.sock is None:
                connection.connect()
                assert connection.sock is not None
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request("GET", "/")
            connection.getresponse().read()
            ANSWERS.extend((int(due * 1e9), time.monotonic_ns()))
        except OSError:
            connection.close()
            time.sleep(0.05)


def backend(address: str, port: str, size: str) -> None:
    """Answers with `size` bytes; `sleep S` on standard input makes it slow."""
    body = os.urandom(int(size))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            time.sleep(SETTING.get("sleep", 0.0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    threading.Thread(target=_obey, daemon=True).start()
    ThreadingHTTPServer((address, int(port)), Handler).serve_forever()


def _obey() -> None:
    for line in sys.stdin:
        name, _, value = line.partition(" ")
        SETTING[name] = float(value)


KINDS: dict[str, Callable[..., None]] = {
    "burn": burn,
    "disk": disk,
    "client": client,
    "backend": backend,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](*sys.argv[2:])
