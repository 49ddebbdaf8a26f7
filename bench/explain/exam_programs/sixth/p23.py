# SPDX-License-Identifier: Apache-2.0
"""Embedding service under asyncio: clients in a closed loop, requests gathered into device batches."""
import asyncio
import time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p23")
CLIENTS = job.size([48, 64], 4)
TOKENS = job.size([384, 512], 8)
DIM = job.size([512, 640], 16)
LAYERS = job.size([6, 8], 1)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(3000, DIM)
        self.norm = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(LAYERS))

    def forward(self, ids):
        x = self.emb(ids)
        for n, u, d in zip(self.norm, self.up, self.down):
            x = x + d(F.gelu(u(n(x))))
        return F.normalize(x.mean(1), dim=1)


class Service:
    def __init__(self):
        self.net = Embedder().to(job.dev).eval()
        self.queue = None
        self.patience = 0.0
        self.full = CLIENTS
        self.batches = 0

    async def lock_batch(self):
        """The first request opens a batch, others may join."""
        batch = [await self.queue.get()]
        closing = time.perf_counter() + self.patience
        while len(batch) < self.full:
            try:
                batch.append(self.queue.get_nowait())
                continue
            except asyncio.QueueEmpty:
                pass
            left = closing - time.perf_counter()
            if left <= 0:
                break
            try:
                batch.append(await asyncio.wait_for(self.queue.get(), left))
            except asyncio.TimeoutError:
                break
        return batch

    @torch.no_grad()
    def embed(self, batch):
        ids = torch.from_numpy(np.stack([ids for ids, _ in batch])).to(job.dev)
        out = self.net(ids).cpu().numpy()
        for (_, fut), row in zip(batch, out):
            if not fut.done():
                fut.set_result(row)

    async def serve(self):
        while True:
            self.embed(await self.lock_batch())
            self.batches += 1


class Client:
    def __init__(self, k):
        self.ids = np.random.default_rng(job.seed * 100 + k).integers(0, 3000, TOKENS)
        self.answer = None

    async def spin(self, service, loop):
        while True:
            fut = loop.create_future()
            service.queue.put_nowait((self.ids, fut))
            self.answer = await fut


class Harness:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.service = Service()
        self.clients = [Client(k) for k in range(CLIENTS)]

    async def run(self, seconds):
        self.service.queue = asyncio.Queue()
        tasks = [asyncio.ensure_future(c.spin(self.service, self.loop)) for c in self.clients]
        tasks.append(asyncio.ensure_future(self.service.serve()))
        job.sync()
        t0, n0 = time.perf_counter(), self.service.batches
        await asyncio.sleep(seconds)
        job.sync()
        ms = (time.perf_counter() - t0) * 1e3 / max(self.service.batches - n0, 1)
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ms


def main():
    h = Harness()

    def patience(n, on):
        h.service.patience = n * 1e-3 if on else 0.0
        h.service.full = 4 * CLIENTS if on else CLIENTS
    c = kit.Cause("sleep_or_remote_wait", "Service.lock_batch", patience, job.share(0.14, 0.19), 2.0, 0.1, 400)
    kit.examine(job, [c], "the batch waits its full timer for further requests although every client is already in it",
                measure=lambda sec: h.loop.run_until_complete(h.run(sec)))


if __name__ == "__main__":
    main()
