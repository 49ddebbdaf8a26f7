# SPDX-License-Identifier: Apache-2.0
"""Asynchronous ranking service; user profiles come from a neighbour process over a Unix socket."""
import asyncio
import os
import shutil
import socketserver
import struct
import tempfile
import time

import torch
import torch.nn as nn

import exam_kit as kit


class Shelf(socketserver.StreamRequestHandler):
    """One connection of the profile store; a cold page takes a while."""

    def handle(self):
        while True:
            raw = self.rfile.read(8)
            if len(raw) < 8:
                return
            cold = self.server.cold.value
            if cold > 0:
                time.sleep(cold * 1e-6)
            self.wfile.write(struct.pack("8f", *[(raw[0] + i) % 7 / 7 for i in range(8)]))
            self.wfile.flush()


def store(path, cold):
    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 32
    s = Server(path, Shelf)
    s.cold = cold
    s.serve_forever()


class Profiles:
    def __init__(self, path, lanes):
        self.path, self.lanes, self.conns = path, lanes, []

    async def open(self):
        for _ in range(400):
            try:
                while len(self.conns) < self.lanes:
                    self.conns.append(await asyncio.open_unix_connection(self.path))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)
        raise RuntimeError("no profile store")

    async def fetch(self, lane, user):
        r, w = self.conns[lane]
        w.write(struct.pack("q", user))
        return struct.unpack("8f", await r.readexactly(32))


class Ranker(nn.Module):
    def __init__(self, dim, h):
        super().__init__()
        self.user = nn.Linear(8, dim)
        self.deep = nn.Sequential(nn.Linear(dim, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, 1))

    def forward(self, items, prof):
        return self.deep(items * torch.sigmoid(self.user(prof)).mean(0)).squeeze(1)


class MatmulService(kit.Job):
    detail = "a request waits for the profile store of a neighbour process before anything is launched"

    def __init__(self, ctx):
        self.dir = tempfile.mkdtemp()
        self.cold = kit.shared(0.0)
        path = os.path.join(self.dir, "s")
        kit.spawn(store, path, self.cold)
        self.dev = ctx.dev
        dim = ctx.pick(32, 1024, 1536)
        self.net = Ranker(dim, ctx.pick(32, 3072, 4096)).to(ctx.dev, ctx.dtype).eval()
        self.items = torch.randn(ctx.pick(50, 65536, 98304), dim, device=ctx.dev, dtype=ctx.dtype)
        self.dtype = ctx.dtype
        self.loop = asyncio.new_event_loop()
        self.profiles = Profiles(path, 3)
        self.loop.run_until_complete(self.profiles.open())
        self.user = 0
        self.levers = [kit.Lever("sleep_or_remote_wait", "Profiles.fetch", self.set_cold, ctx.share(0.13, 0.18),
                                 start=ctx.pick(300, 1000))]

    def set_cold(self, a):
        self.cold.value = a

    async def serve_one(self):
        self.user += 1
        prof = await asyncio.gather(*[self.profiles.fetch(k, self.user + k) for k in range(3)])
        with torch.no_grad():
            p = torch.tensor(prof).to(self.dev, self.dtype)
            return self.net(self.items, p).topk(10).indices.tolist()

    async def serve(self, seconds):
        n, end = 0, time.perf_counter() + seconds
        while n < 2 or time.perf_counter() < end:
            await self.serve_one()
            n += 1
        return n

    def run_for(self, seconds):
        return self.loop.run_until_complete(self.serve(seconds))

    def close(self):
        kit.stop_children()
        shutil.rmtree(self.dir, ignore_errors=True)


if __name__ == "__main__":
    kit.main(MatmulService)
