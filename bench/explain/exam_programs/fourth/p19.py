# SPDX-License-Identifier: Apache-2.0
"""Wide mixture-of-experts feed-forward training, dense routing."""
import threading
import time
import torch
import torch.nn as nn
from rig import Job


class Experts(nn.Module):
    def __init__(self, e, d, h):
        super().__init__()
        self.gate = nn.Linear(d, e)
        self.w1 = nn.Parameter(torch.randn(e, d, h) * d ** -0.5)
        self.w2 = nn.Parameter(torch.randn(e, h, d) * h ** -0.5)

    def forward(self, x):
        g = torch.softmax(self.gate(x).float(), -1).to(x.dtype)
        y = torch.bmm(torch.relu(torch.bmm(x.expand(self.w1.shape[0], -1, -1), self.w1)), self.w2)
        return x + torch.einsum("end,ne->nd", y, g)


class Meter:
    def __init__(self):
        self.v = []

    def sync_all(self, loss):
        self.v.append(loss.detach())
        if len(self.v) > 50:
            self.v = [torch.stack(self.v).mean()]


def loader_loop(stop):
    n = 0
    while not stop.wait(0.2):
        n += 1


def main():
    job = Job()
    d = job.pick(1536, 2048, tiny=16)
    net = nn.ModuleList(Experts(4, d, 2 * d) for _ in range(job.pick(3, 4, tiny=1))).to(job.dev, job.half)
    opt = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(job.pick(4096, 6144, tiny=8), d, device=job.dev, dtype=job.half)
    stop, meter = threading.Event(), Meter()
    threading.Thread(target=loader_loop, args=(stop,), name="dataloader", daemon=True).start()

    def step():
        h = x
        for m in net:
            h = m(h)
        loss = (h - x).float().pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        meter.sync_all(loss)
        job.pace(3)

    job.rate(step, 0.05 if job.smoke else 1.0)
    job.show(step, lambda: None, [], healthy=True)
    stop.set()


if __name__ == "__main__":
    main()
