# SPDX-License-Identifier: Apache-2.0
"""Molecular dynamics of a Lennard-Jones fluid with a restartable trajectory."""
import os
import struct
import tempfile
import torch
import exam_kit as kit

job = kit.Job("p09")
ATOMS = job.size([4096, 5120, 6144], 100)
INNER = job.size([8, 10], 2)
BOX = 40.0


class Fluid:
    def __init__(self):
        n = round(ATOMS ** (1 / 3) + 0.5)
        g = torch.arange(n, device=job.dev, dtype=torch.float32) * (BOX / n)
        self.x = torch.cartesian_prod(g, g, g)[:ATOMS].contiguous()
        self.v = torch.randn_like(self.x) * 0.1
        self.f = torch.zeros_like(self.x)

    def forces(self):
        d = self.x[:, None, :] - self.x[None, :, :]
        d -= BOX * torch.round(d / BOX)
        r2 = (d * d).sum(-1).clamp_min_(0.7)
        r2.fill_diagonal_(1e9)
        i6 = r2.reciprocal().pow_(3)
        w = 24 * i6 * (2 * i6 - 1) / r2
        return (d * w.clamp_(-50, 50)[..., None]).sum(1)

    def advance(self):
        for _ in range(INNER):
            self.v.add_(self.f, alpha=5e-4)
            self.x.add_(self.v, alpha=1e-3).remainder_(BOX)
            self.f = self.forces()
            self.v.add_(self.f, alpha=5e-4)
        self.v.mul_(0.999)


class Trajectory:
    """Frames are cut into atom groups; each group is a record a restart can trust."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="traj")
        self.file = open(os.path.join(self.dir, "run.trj"), "wb")
        self.rate = 0.0
        self.ticks = kit.Ticks()
        self.last = None
        self.no = 0

    def quantize_gpu(self, frame):
        self.last = frame
        groups = self.ticks.take(self.rate)
        raw = memoryview(frame).cast("B")
        size = max(len(raw) // 8, 1)
        for g in range(groups):
            part = raw[(g % 8) * size:(g % 8 + 1) * size]
            self.file.write(struct.pack("<qi", self.no, len(part)))
            self.file.write(part)
            self.file.flush()
            os.fsync(self.file.fileno())
            self.no += 1
            if self.file.tell() > 64 << 20:
                self.file.seek(0)

    def close(self):
        self.file.close()
        os.unlink(os.path.join(self.dir, "run.trj"))
        os.rmdir(self.dir)


class Simulation:
    def __init__(self):
        self.fluid, self.traj = Fluid(), Trajectory()

    def kernel_burst(self):
        self.fluid.advance()
        self.traj.quantize_gpu(self.fluid.x.cpu().numpy())


def main():
    s = Simulation()
    kit.on_close(s.traj.close)

    def records(n, on):
        s.traj.rate = n if on else 0.0
    c = kit.Cause("io", "Trajectory.quantize_gpu", records, job.share(0.23, 0.31), 2, 0.02, 20000)
    kit.examine(job, [c], "every group of the trajectory is written and fsynced on its own within the step", step=s.kernel_burst,
                window=0.8)


if __name__ == "__main__":
    main()
