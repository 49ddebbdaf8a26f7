# SPDX-License-Identifier: Apache-2.0
"""asyncio scoring service: rows come from a small HTTP feature store, the model is one CUDA graph."""
import asyncio
import http.server
import multiprocessing as mp
import socket
import threading
import time

import numpy as np
import torch

ROWS = 64


def store_main(pipe, lag):
    blob = np.random.default_rng(0).standard_normal((ROWS, 256)).astype(np.float32).tobytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 17

        def setup(self):
            super().setup()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def do_GET(self):
            if lag.value > 0:
                time.sleep(lag.value)
            self.send_response(200)
            self.send_header("Content-Length", str(len(blob)))
            self.end_headers()
            self.wfile.write(blob)
            self.wfile.flush()

        def log_message(self, *a):
            pass

    srv = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(srv.server_address[1])
    srv.serve_forever()


class FeatureClient:
    def __init__(self, port):
        self.port = port
        self.conn = None

    async def rows(self):
        if self.conn is None:
            self.conn = await asyncio.open_connection("127.0.0.1", self.port)
        r, w = self.conn
        w.write(b"GET /rows HTTP/1.1\r\nHost: store\r\n\r\n")
        await w.drain()
        head = await r.readuntil(b"\r\n\r\n")
        n = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return np.frombuffer(await r.readexactly(n), np.float32).reshape(ROWS, 256)


class Scorer:
    def __init__(self, job, width, depth, reps):
        mk = lambda a, b: torch.randn(a, b, device=job.dev, dtype=job.half) / a ** 0.5
        self.inp = mk(256, width)
        self.mats = [mk(width, width) for _ in range(depth)]
        self.x = torch.zeros(ROWS, 256, device=job.dev)
        self.reps = reps
        self.job = job
        self.y = None
        self.run = job.graph(self.forward)

    @torch.no_grad()
    def forward(self):
        h = self.x.to(self.inp.dtype) @ self.inp
        for _ in range(self.reps):
            for m in self.mats:
                h = torch.tanh(h @ m)
        self.y = h.float().mean(1)

    def copy_blocking(self, rows):
        self.x.copy_(torch.from_numpy(rows.copy()))


def main():
    lag = mp.get_context("fork").Value("d", 0.0, lock=False)
    here, there = mp.Pipe()
    child = mp.get_context("fork").Process(target=store_main, args=(there, lag), daemon=True)
    child.start()
    from rig import Job
    job = Job(0.21, 0.43)
    port = here.recv()
    threading.Thread(target=threading.Event().wait, name="DataLoader-pin", daemon=True).start()
    model = Scorer(job, job.pick(4096, 6144, tiny=64), job.pick(8, 10, tiny=2), job.pick(12, 16, 20, tiny=1))
    client = FeatureClient(port)
    loop = asyncio.new_event_loop()

    async def one():
        rows = await client.rows()
        model.copy_blocking(rows)
        model.run()
        out = model.y.cpu()
        return float(out[0])

    def step():
        loop.run_until_complete(one())

    def setk(k):
        lag.value = float(k)

    try:
        job.tune(step, setk, 0.003, 0.2)
        job.show(step, lambda: setk(0), [("sleep_or_remote_wait", "FeatureClient.rows")])
    finally:
        if client.conn:
            client.conn[1].close()
        child.terminate()
        child.join()


if __name__ == "__main__":
    main()
