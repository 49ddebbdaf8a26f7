# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel workers (gloo) that share one card; gradients travel through host memory."""
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
PART = int(os.environ.get("PART", "0"))
if __name__ == "__main__" and PART == 0:
    # the partner starts first, so that both load their libraries at the same time
    TMP = tempfile.mkdtemp(prefix="pair")
    STORE = os.path.join(TMP, "store")
    KID = subprocess.Popen([sys.executable, os.path.abspath(__file__)] + sys.argv[1:],
                           env=dict(os.environ, PART="1", STORE=STORE), stdout=subprocess.DEVNULL)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from rig import Job


class ShardFeeder:
    """Pads and sorts the sequences of this worker's shard."""

    def __init__(self, rank, batch, width):
        self.r = np.random.default_rng(rank)
        self.data = self.r.standard_normal((batch, width)).astype(np.float32)
        self.extra = 0

    def pack(self):
        part = self.data[:8]
        for _ in range(self.extra):
            order = np.argsort(part, axis=1, kind="stable")
            np.take_along_axis(part, order, 1)
        return self.data


class Worker:
    def __init__(self, job, rank):
        self.job, self.rank = job, rank
        w = job.pick(1024, 1280, tiny=32)
        self.feed = ShardFeeder(rank, job.pick(2048, 3072, tiny=64), w)
        self.x = torch.from_numpy(self.feed.data).to(job.dev)
        self.body = nn.Sequential(*[m for _ in range(job.pick(10, 14, tiny=1)) for m in (nn.Linear(w, w), nn.ReLU())]).to(job.dev)
        self.head = nn.Linear(w, 512 if job.cuda else 8).to(job.dev)
        for p in self.body.parameters():
            p.requires_grad_(False)
        self.opt = torch.optim.SGD(self.head.parameters(), lr=1e-4)
        self.k, self.quit = 0, 0

    def exchange(self):
        flat = torch.cat([p.grad.flatten() for p in self.head.parameters()]).cpu()
        dist.all_reduce(flat)
        flat = (flat / 2).to(self.job.dev)
        n = 0
        for p in self.head.parameters():
            p.grad.copy_(flat[n:n + p.numel()].view_as(p))
            n += p.numel()

    def step(self):
        ctl = torch.tensor([self.k, self.quit])
        dist.broadcast(ctl, 0)
        if int(ctl[1]):
            return False
        self.feed.extra = int(ctl[0]) if self.rank == 1 else 0
        self.feed.pack()
        loss = self.head(self.body(self.x)).pow(2).mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.exchange()
        self.opt.step()
        return True


def main():
    job = Job(0.22, 0.43)
    rank = PART
    store = STORE if rank == 0 else os.environ["STORE"]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    w = Worker(job, rank)
    if rank == 1:
        while w.step():
            pass
        job.fence()
        dist.destroy_process_group()
        return

    def setk(k):
        w.k = int(k)

    try:
        job.tune(w.step, setk, 2, 1000, whole=True, secs=0.3)
        job.show(w.step, lambda: setk(0), [("straggler_rank", "ShardFeeder.pack")], slow_rank=1)
        w.quit = 1
        w.step()
        KID.wait(10)
    finally:
        if KID.poll() is None:
            KID.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        if os.path.exists(store):
            os.unlink(store)
        os.rmdir(TMP)


if __name__ == "__main__":
    main()
