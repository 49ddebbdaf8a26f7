# SPDX-License-Identifier: Apache-2.0
"""Cloth simulation for a renderer: integration, body collision, then relaxation of the springs."""
import torch
import exam_kit as kit

job = kit.Job("p04")
SIDE = job.size([80, 96, 112], 10)
BODY = job.size([4096, 6144], 40)
SUBSTEPS = job.size(4, 1)


def grid_springs(side, dev):
    idx = torch.arange(side * side, device=dev).view(side, side)
    pairs = [(idx[:, :-1], idx[:, 1:]), (idx[:-1], idx[1:]), (idx[:-1, :-1], idx[1:, 1:])]
    a = torch.cat([p.reshape(-1) for p, _ in pairs])
    b = torch.cat([q.reshape(-1) for _, q in pairs])
    order = torch.randperm(a.numel(), device=dev)
    return a[order], b[order]


class Cloth:
    def __init__(self):
        u = torch.linspace(-1, 1, SIDE, device=job.dev)
        gx, gy = torch.meshgrid(u, u, indexing="ij")
        self.x = torch.stack([gx, gy, torch.ones_like(gx)], -1).view(-1, 3).contiguous()
        self.v = torch.zeros_like(self.x)
        self.a, self.b = grid_springs(SIDE, job.dev)
        self.rest = (self.x[self.a] - self.x[self.b]).norm(dim=1)
        self.body = torch.randn(BODY, 3, device=job.dev) * 0.4
        self.islands = 1

    def integrate(self, dt):
        self.v.mul_(0.995)
        self.v[:, 2] -= 9.8 * dt
        self.x.add_(self.v, alpha=dt)

    def collide(self):
        d = torch.cdist(self.x, self.body)
        near, who = d.min(1)
        push = self.x - self.body[who]
        hit = (near < 0.08).unsqueeze(1)
        self.x = torch.where(hit, self.x + push * (0.08 - near).unsqueeze(1) * 0.5, self.x)

    def memcpy_pass(self):
        for a, b, rest in zip(self.a.chunk(self.islands), self.b.chunk(self.islands), self.rest.chunk(self.islands)):
            d = self.x[a] - self.x[b]
            length = d.norm(dim=1).clamp_min(1e-6)
            corr = d * ((length - rest) / length * 0.12).unsqueeze(1)
            self.x.index_add_(0, a, corr, alpha=-1)
            self.x.index_add_(0, b, corr)


class Show:
    def __init__(self):
        self.cloth = Cloth()
        self.frame = None

    def next_frame(self):
        for _ in range(SUBSTEPS):
            self.cloth.integrate(0.002)
            self.cloth.collide()
            self.cloth.memcpy_pass()
        self.cloth.x.clamp_(-5, 5)
        self.frame = self.cloth.x.cpu()


def main():
    s = Show()

    def split(n, on):
        s.cloth.islands = max(1, int(round(n))) if on else 1
    c = kit.Cause("launch_overhead", "Cloth.memcpy_pass", split, job.share(0.43, 0.55), 8, 2, 3000)
    kit.examine(job, [c], "the spring relaxation is cut into many small islands, each with its own dozen of tiny kernels",
                step=s.next_frame)


if __name__ == "__main__":
    main()
