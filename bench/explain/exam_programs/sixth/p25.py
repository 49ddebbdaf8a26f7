# SPDX-License-Identifier: Apache-2.0
"""Shallow-water model of a bay, explicit in time, single precision."""
import torch
import exam_kit as kit

job = kit.Job("p25")
NX = job.size([3072, 4096], 48)
INNER = job.size([4, 6], 1)


class Bay:
    def __init__(self):
        y = torch.linspace(-1, 1, NX, device=job.dev)
        self.h = 1.0 + 0.1 * torch.exp(-20 * (y[:, None] ** 2 + y[None, :] ** 2))
        self.u = torch.zeros_like(self.h)
        self.v = torch.zeros_like(self.h)
        self.flux = torch.zeros_like(self.h)

    def advance(self, dt=0.05):
        h, u, v = self.h, self.u, self.v
        u[:, 1:-1].add_(h[:, 2:] - h[:, :-2], alpha=-0.5 * dt)
        v[1:-1].add_(h[2:] - h[:-2], alpha=-0.5 * dt)
        u.mul_(0.9995)
        v.mul_(0.9995)
        self.flux.zero_()
        self.flux[:, 1:-1] += u[:, 2:] - u[:, :-2]
        self.flux[1:-1] += v[2:] - v[:-2]
        h.add_(self.flux, alpha=-0.5 * dt)


class Album:
    """Earlier states for the gauges along the shore; the gauges read a handful of cells."""

    def __init__(self, bay):
        self.bay = bay
        self.slots = [torch.zeros_like(bay.h) for _ in range(3)]
        self.rows = 0
        self.gauges = torch.zeros(3, 8, device=job.dev)

    def python_side_list(self):
        left, k = self.rows, 0
        while left > 0:
            src = (self.bay.h, self.bay.u, self.bay.v)[k % 3]
            take = min(left, NX)
            self.slots[k % 3][:take].copy_(src[:take])
            left -= take
            k += 1

    def read_gauges(self):
        for k, f in enumerate((self.bay.h, self.bay.u, self.bay.v)):
            self.gauges[k].copy_(f[5, 10:18])


class Model:
    def __init__(self):
        self.bay = Bay()
        self.album = Album(self.bay)

    @torch.no_grad()
    def gc_friendly_step(self):
        for _ in range(INNER):
            self.bay.advance()
        self.album.python_side_list()
        self.album.read_gauges()


def main():
    m = Model()

    def rows(n, on):
        m.album.rows = int(n) if on else 0
    c = kit.Cause("device_memory_bandwidth", "Album.python_side_list", rows, job.share(0.14, 0.19), NX * 2, 8, NX * 400)
    kit.examine(job, [c], "whole fields are copied on the device in each step although only a few cells are read",
                step=m.gc_friendly_step)


if __name__ == "__main__":
    main()
