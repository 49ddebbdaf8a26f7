# SPDX-License-Identifier: Apache-2.0
"""Asynchronous recommendation gateway: profile from a neighbour process, scores, business adjustments."""
import asyncio
import json
import socket
import sys
import time

import stage


def profiles(opts):
    stage.tie_to_parent()
    dial = stage.Dial(opts.arg)
    srv = socket.create_server(("127.0.0.1", 0))
    print(srv.getsockname()[1], flush=True)
    conn, _ = srv.accept()
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = conn.makefile("rwb")
    for line in lines:
        lag = dial[0]
        if lag > 0:
            time.sleep(lag)
        n = int(line)
        lines.write(json.dumps({"w": [(n * k) % 11 for k in range(32)]}).encode() + b"\n")
        lines.flush()


class Gateway:
    def __init__(self, port):
        self.port = port
        self.n = 0

    async def open(self):
        self.r, self.w = await asyncio.open_connection("127.0.0.1", self.port)
        self.w.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def fetch(self):
        self.n += 1
        self.w.write(b"%d\n" % self.n)
        return json.loads(await self.r.readline())["w"]


class Reranker:
    def __init__(self, torch, opts):
        s = opts.smoke
        self.torch, self.dev = torch, opts.device
        d, rows = (16, 64) if s else (2048, 65536)
        nn = torch.nn
        dt = torch.float32 if s else torch.float16
        self.net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(d, d), nn.ReLU())]).to(self.dev, dt)
        self.items = torch.randn(rows, d, device=self.dev, dtype=dt)
        self.rules = 0.0

    def adjust(self, scores, weights):
        for k in range(int(self.rules)):
            part = scores[k % 61:k % 61 + 8]
            part.mul_(0.999).add_(weights[k % 32] * 1e-6)

    def rank(self, weights):
        bonus = self.torch.zeros(len(self.items), device=self.dev)
        self.adjust(bonus, weights)
        scores = self.net(self.items).mean(1) + bonus
        return scores.topk(10).indices.tolist()

    def set_rules(self, x):
        self.rules = x


def main():
    opts = stage.options()
    if opts.role == "profiles":
        return profiles(opts)
    dial = stage.Dial()
    proc = stage.child("profiles", dial.path, opts, pipe=True)
    import torch
    ranker = Reranker(torch, opts)
    gate = Gateway(int(proc.stdout.readline()))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(gate.open())

    async def ticker():
        while True:
            await asyncio.sleep(0.05)

    loop.create_task(ticker(), name="blocking-io")

    async def request():
        weights = await gate.fetch()
        with torch.inference_mode():
            return ranker.rank(weights)

    def lag(x):
        dial[0] = x

    stage.conduct(opts, lambda: loop.run_until_complete(request()), [
        stage.Factor("sleep_or_remote_wait", "Gateway.fetch", "main.request", lag, 0.001),
        stage.Factor("launch_overhead", "Reranker.adjust", "", ranker.set_rules, 100.0),
    ], "pair")


if __name__ == "__main__":
    sys.exit(main())
