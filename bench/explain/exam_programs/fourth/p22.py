# SPDX-License-Identifier: Apache-2.0
"""Bootstrap particle filter for terrain navigation, weights by a learned sensor model."""
import threading
import torch
import torch.nn as nn
from rig import Job


class Cloud:
    def __init__(self, job, n, d):
        self.p = torch.randn(n, d, device=job.dev)
        self.parts = 0

    def prune(self, w):
        """Moves particles of negligible weight to the centre, in `parts` pieces."""
        centre = self.p.mean(0)
        if not self.parts:
            self.p = torch.where((w < 1e-12)[:, None], centre, self.p)
            return
        for p, v in zip(self.p.chunk(self.parts), w.chunk(self.parts)):
            bad = v < 1e-12
            idx = bad.nonzero().squeeze(1)
            if idx.numel():
                p[idx] = centre

    def resample(self, w):
        c = torch.cumsum(w.double(), 0)
        n = w.numel()
        u = (torch.arange(n, device=w.device) + torch.rand((), device=w.device)) / n * c[-1]
        self.p = self.p[torch.searchsorted(c, u).clamp_(max=n - 1)]


class Sensor(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(),
                               nn.Linear(h, 1))

    def forward(self, p):
        return self.f(p).squeeze(1)


def collect_garbage(cloud):
    # bounds the cloud
    cloud.p.clamp_(-50, 50)


@torch.no_grad()
def main():
    job = Job(0.11, 0.2)
    n = job.pick(131072, 196608, tiny=1024)
    d = 12
    cloud = Cloud(job, n, d)
    sensor = Sensor(d, job.pick(768, 1024, tiny=16)).to(job.dev)
    if job.cuda:
        torch.backends.cuda.matmul.allow_tf32 = True
    noise = torch.empty_like(cloud.p)
    threading.Thread(target=threading.Event().wait, name="sqlite-writer", daemon=True).start()

    def step():
        noise.normal_(0, 0.02)
        cloud.p = cloud.p * 0.999 + noise
        w = torch.softmax(sensor(cloud.p), 0)
        cloud.prune(w)
        cloud.resample(w)
        collect_garbage(cloud)
        job.pace(2)

    def setk(k):
        cloud.parts = int(k)

    job.tune(step, setk, 6, 500, whole=True)
    job.show(step, lambda: setk(0), [("synchronization", "Cloud.prune")])


if __name__ == "__main__":
    main()
