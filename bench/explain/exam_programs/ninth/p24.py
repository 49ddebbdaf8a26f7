# SPDX-License-Identifier: Apache-2.0
"""Seismic inversion: acoustic shots through a velocity model, receivers compared with field records."""
import kit
import ctypes
import torch
import torch.nn.functional as F


class Survey:
    """Field records of all shots, one block in host memory."""

    def __init__(self, stage, floats):
        self.stage = stage
        self.block = torch.ones(floats + 1024)
        base = self.block.data_ptr()
        self.start = (-base % 4096) // 4
        self.here = torch.zeros(1 << 16, device=stage.device)

    def fetch(self, size):
        n = min(int(size) // 4096 * 4096, (len(self.block) - 1024) * 4)
        part = self.block[self.start:self.start + min(len(self.here), len(self.block) - 1024)]
        if n and self.stage.cuda:
            rt = torch.cuda.cudart()
            where = self.block.data_ptr() + 4 * self.start
            if int(rt.cudaHostRegister(where, n, 0)):
                raise RuntimeError("the records' block is not usable")
            self.here[:len(part)].copy_(part)
            rt.cudaHostUnregister(where)
        else:
            if n:
                ctypes.memset(self.block.data_ptr() + 4 * self.start, 0, min(n, 4096))
            self.here[:len(part)].copy_(part)
        return self.here


class Earth:
    def __init__(self, stage, nz, nx, receivers):
        d = stage.device
        self.stage = stage
        self.c2 = torch.full((nz, nx), 0.1, device=d)
        self.u = torch.zeros(nz, nx, device=d)
        self.v = torch.zeros(nz, nx, device=d)
        self.receivers = receivers

    def shoot(self, steps):
        u, v = self.u, self.v
        u.zero_()
        v.zero_()
        u[4, u.shape[1] // 2] = 1.0
        for _ in range(steps):
            lap = -4.0 * u
            lap[1:] += u[:-1]
            lap[:-1] += u[1:]
            lap[:, 1:] += u[:, :-1]
            lap[:, :-1] += u[:, 1:]
            u, v = 2.0 * u - v + self.c2 * lap, u
        return u

    def trace(self, u, records, n):
        """Receiver by receiver: window, taper, difference."""
        total = torch.zeros((), device=u.device)
        for k in range(n):
            r = k % self.receivers
            window = u[3, r:r + 8]
            total += ((window - records[r:r + 8]) * 0.5).abs().sum()
        return total


def invert(stage, earth, survey, steps):
    while True:
        records = survey.fetch(stage.amount("a"))
        u = earth.shoot(steps)
        misfit = F.mse_loss(u[3, :64], records[:64]).item()
        earth.trace(u, records, stage.times("b"))
        earth.c2.mul_(1.0 - 1e-7 * min(1.0, misfit))
        if stage.cuda:
            torch.cuda.current_stream().synchronize()
        if not stage.tick():
            return


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("allocator", "Survey.fetch", kit.PAIR, start=8e6, tiny=1e5, least=1 << 19, most=1 << 28),
        "b": kit.Part("launch_overhead", "Earth.trace", kit.PAIR, start=60, tiny=10, least=1),
    }, "the field records are registered with the driver and released for every shot; receivers are visited one by one")
    if stage.smoke:
        earth, survey, steps = Earth(stage, 64, 128, 32), Survey(stage, 1 << 16), 3
    else:
        earth = Earth(stage, stage.pick(2048, 3072), stage.pick(3072, 4096), 512)
        survey, steps = Survey(stage, 64 << 20), stage.pick(10, 12, 16)
    invert(stage, earth, survey, steps)
    stage.leave()
