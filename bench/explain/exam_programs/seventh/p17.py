# SPDX-License-Identifier: Apache-2.0
"""Two-tower retrieval, data parallel: two ranks on one card, gradients averaged over gloo."""
import datetime, os, sys
import exam_kit
from exam_kit import Cause


class Shard:
    """Hard negatives of one rank's share of the catalogue."""

    def __init__(self, seed):
        import numpy as np
        self.g = np.random.default_rng(seed)
        self.pop = self.g.random(1 << 25, dtype=np.float32)
        self.scratch = np.zeros_like(self.pop)

    def forward_backward(self, n):
        at = int(self.g.integers(0, len(self.pop) - n)) if n < len(self.pop) else 0
        part = self.scratch[:n]
        part[:] = self.pop[at:at + n]
        part.sort()
        return float(part[-64:].mean())


class Rank:
    def __init__(self, rank, seed, smoke, port):
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.rank = torch, dist, rank
        torch.set_num_threads(2)
        torch.manual_seed(seed)
        dev = exam_kit.device()
        if os.path.exists("/sys/class/net/lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                                timeout=datetime.timedelta(seconds=90))
        d, self.b = (16, 8) if smoke else (512, (12288, 16384)[seed % 2])
        self.dev, self.d = dev, d
        nn = torch.nn
        self.net = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)).to(dev)
        self.shard = Shard(seed + rank)
        self.base = 500 if smoke else 10000

    def average_batch(self):
        t, dist = self.torch, self.dist
        flat = t.cat([p.grad.flatten() for p in self.net.parameters()]).cpu()
        dist.all_reduce(flat)
        flat = flat.to(self.dev) * 0.5
        at = 0
        with t.no_grad():
            for p in self.net.parameters():
                p -= 1e-4 * flat[at:at + p.numel()].view_as(p)
                at += p.numel()

    def train(self, extra):
        t = self.torch
        hard = self.shard.forward_backward(self.base + (extra if self.rank == 1 else 0))
        x = t.randn(self.b, self.d, device=self.dev)
        y = t.nn.functional.normalize(self.net(x), dim=1)
        z = t.nn.functional.normalize(self.net(x + 0.1 * hard), dim=1)
        n = min(self.b, 4096)
        loss = t.nn.functional.cross_entropy(y[:n] @ z[:n].t() * 20, t.arange(n, device=self.dev))
        self.net.zero_grad()
        loss.backward()
        self.average_batch()
        return loss.item()


class Retrieval:
    def __init__(self, rng, smoke, dev):
        import socket
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        seed = rng.randrange(1000)
        self.child = exam_kit.spawn(__file__, "--role", seed, int(smoke), port)
        self.me = Rank(0, seed, smoke, port)
        self.extra = 0
        self.causes = [Cause("straggler_rank", "Shard.forward_backward", self.set_extra, 500 if smoke else 300000, 100, 32_000_000,
                             integer=True, also="Rank.average_batch")]

    def set_extra(self, a, on):
        self.extra = int(a) if on else 0

    def step(self):
        ctl = self.me.torch.tensor([1, self.extra])
        self.me.dist.broadcast(ctl, 0)
        self.me.train(self.extra)

    def close(self):
        self.me.dist.broadcast(self.me.torch.tensor([0, 0]), 0)


def second_rank(seed, smoke, port):
    r = Rank(1, seed, smoke, port)
    while True:
        ctl = r.torch.zeros(2, dtype=r.torch.long)
        r.dist.broadcast(ctl, 0)
        if not int(ctl[0]):
            os._exit(0)
        r.train(int(ctl[1]))


if __name__ == "__main__":
    if "--role" in sys.argv:
        exam_kit.die_with_parent()
        second_rank(int(sys.argv[2]), bool(int(sys.argv[3])), int(sys.argv[4]))
    else:
        exam_kit.main(Retrieval, "high", "rank 1 sorts a far larger share of the catalogue; rank 0 waits for it in the all-reduce")
