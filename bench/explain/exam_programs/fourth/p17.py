# SPDX-License-Identifier: Apache-2.0
"""Adapter server: one compiled trunk, many tenants' low-rank adapters swapped in turn."""
import torch
import torch._dynamo
import torch.nn as nn
from rig import Job


class Trunk(nn.Module):
    def __init__(self, d, n, rank):
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.norm = nn.LayerNorm(d)
        self.a = nn.Parameter(torch.zeros(d, rank))
        self.b = nn.Parameter(torch.randn(rank, d) * 0.01)

    def forward(self, x, reps):
        for _ in range(reps):
            for l in self.lin:
                x = x + torch.nn.functional.gelu(l(self.norm(x)))
            x = x + (x @ self.a) @ self.b
        return x


class AdapterHost:
    def __init__(self, job):
        self.job = job
        d = job.pick(2048, 3072, tiny=32)
        self.trunk = Trunk(d, job.pick(3, 4, tiny=1), 16).to(job.dev, job.half).eval()
        self.bank = [torch.randn(d, 16, device=job.dev, dtype=job.half) * 0.01 for _ in range(6)]
        self.x = torch.randn(job.pick(2048, 4096, tiny=4), d, device=job.dev, dtype=job.half)
        self.fast = torch.compile(self.trunk, backend="eager", dynamic=False)
        self.reps = 2
        self.every = 0
        self.calls = 0

    def swap(self, i):
        self.trunk.a.data.copy_(self.bank[i % 6])
        if self.every and i % self.every == 0:
            torch._dynamo.reset()

    @torch.no_grad()
    def infer(self):
        y = self.fast(self.x, self.reps)
        return y

    def request(self):
        self.calls += 1
        self.swap(self.calls)
        self.answer = self.infer()[:, 0].float().mean()
        self.job.pace(2)


def load_batch(host):
    host.request()


def main():
    job = Job(0.46, 0.72)
    host = AdapterHost(job)
    step = lambda: load_batch(host)

    step()
    import time
    # a request of about 6-10 ms without, and as many requests per rebuild as the share wants
    job.size(step, lambda n: setattr(host, "reps", n), 1, job.rng.uniform(6, 10), 6)
    step()
    base = job.rate(step, 0.05 if job.smoke else 0.4)
    job.fence()
    t = time.perf_counter()
    for _ in range(3):
        torch._dynamo.reset()
        step()
        job.fence()
    extra = max(1e-4, (time.perf_counter() - t) / 3 - base)
    goal = base * job.share / (1 - job.share)
    host.every = job.k = max(1, round(extra / goal))
    for _ in range(2 * min(host.every, 10)):
        step()

    def off():
        host.every = 0

    job.show(step, off, [("recompilation", "AdapterHost.infer")], also="AdapterHost.swap")


if __name__ == "__main__":
    main()
