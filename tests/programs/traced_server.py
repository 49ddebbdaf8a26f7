# SPDX-License-Identifier: Apache-2.0
"""An HTTP server with a thread for each connection, whose handlers are instrumented with
OpenTelemetry as its own libraries do it: each request is a span, the child of the caller's.

GET /spin/SECONDS computes, GET /sleep/SECONDS waits, GET /held waits for GET /go and then
computes for a second; anything else is answered at once. An answer
has the server's own trace id. Prints its port.
"""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())
TRACER = trace.get_tracer("traced_server")
GO = threading.Event()


def spin_for_request(seconds: float) -> None:
    """Use as much time of a CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        context = extract(dict(self.headers.items()))
        with TRACER.start_as_current_span("GET", context, trace.SpanKind.SERVER) as span:
            _, what, seconds = (*self.path.split("/"), "0")[:3]
            if what == "spin":
                spin_for_request(float(seconds))
            elif what == "sleep":
                time.sleep(float(seconds))
            elif what == "held":
                GO.wait()
                spin_for_request(1)
            elif what == "go":
                GO.set()
            body = f"{span.get_span_context().trace_id:032x}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/after":
            spin_for_request(0.5)  # the request is answered: this counts for none

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
