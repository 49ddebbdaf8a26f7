# SPDX-License-Identifier: Apache-2.0
"""A server that asks the ledger about each request: `orders.py LEDGER_PORT [TIMEOUT]`. Four
clients of it are threads of another process (`shoppers.py`). With a timeout, in seconds, Python
waits for an answer in poll(2)."""

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LedgerClient(threading.local):
    """A connection to the ledger for each thread."""

    def __init__(self) -> None:
        timeout = float(sys.argv[2]) if len(sys.argv) > 2 else None
        self.link = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout)

    def book(self, line: bytes) -> bytes:
        """Have an order committed."""
        self.link.sendall(line)
        return self.link.recv(64)


LEDGER = LedgerClient()


class Handler(BaseHTTPRequestHandler):
    """Orders."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Book one."""
        answer = LEDGER.book(b"order " + self.path.encode() + b"\n")
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
