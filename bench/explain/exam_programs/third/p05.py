# SPDX-License-Identifier: Apache-2.0
"""Diffusion sampler for latent vectors: the denoiser runs as a CUDA graph, the update rule per tile."""
import math
import threading
import torch
from rig import Kit, Net, DEV


class Schedule:
    def __init__(self, steps):
        self.steps = steps
        t = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
        self.a = [max(1e-4, v / t[0]) for v in t]

    def coeff(self, i):
        a0, a1 = self.a[i % self.steps], self.a[(i + 1) % self.steps]
        return math.sqrt(a1 / a0) if a1 < a0 else 0.999, 0.01 * math.sqrt(1 - a1)


class Sampler:
    def __init__(self, net, rows, d, sched):
        dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
        self.net = net.to(DEV).to(dt).eval()
        self.x = torch.randn(rows, d, device=DEV, dtype=dt)
        self.eps = torch.zeros_like(self.x)
        self.sched = sched
        self.tiles = 1
        self.guidance = [1.0]

    def denoise(self):
        self.eps.copy_(self.net(self.x))

    def set_tiles(self, n, rng):
        self.tiles = n
        self.guidance = [rng.uniform(0.8, 1.2) for _ in range(n + 1)]

    def update_tiled(self, i):
        """every tile has a guidance scale of its own"""
        a, b = self.sched.coeff(i)
        size = max(1, self.x.shape[0] // self.tiles)
        for j in range(self.tiles):
            lo = (j * size) % self.x.shape[0]
            xt = self.x[lo:lo + size]
            xt.mul_(a).sub_(self.eps[lo:lo + size], alpha=b * self.guidance[j])

    def update(self, i):
        a, b = self.sched.coeff(i)
        self.x.mul_(a).sub_(self.eps, alpha=b)


def keep_warm(stop):
    while not stop.wait(0.25):
        pass


@torch.no_grad()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([1024, 1280]), 32)
    rows = kit.n(rng.choice([4096, 6144, 8192]), 64)
    s = Sampler(Net(d, kit.n(rng.choice([6, 8]), 1)), rows, d, Schedule(rng.choice([40, 50, 60])))
    share = kit.share(0.7, 0.92, 1.1)
    stop = threading.Event()
    threading.Thread(target=keep_warm, args=(stop,), name="queue_feeder", daemon=True).start()
    denoise = kit.graph(s.denoise)

    def plain(i=0):
        denoise()
        s.update(i)

    base, _ = kit.measure(plain)
    s.set_tiles(kit.n(200, 4), rng)
    _, loop = kit.measure(lambda: s.update_tiled(0), 10, 2)
    s.set_tiles(max(2, int(base / (1 - share) / (loop / s.tiles))), rng)
    kit.cause("launch_overhead", kit.place(Sampler.update_tiled, "xt.mul_"),
              "two tiny kernels per tile instead of one per step", "update_tiled")
    for i in kit.steps(warm=12):
        denoise()
        if kit.on:
            s.update_tiled(i)
        else:
            s.update(i)
        if i % 50 == 49:
            s.x.normal_()


if __name__ == "__main__":
    main()
