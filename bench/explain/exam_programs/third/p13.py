# SPDX-License-Identifier: Apache-2.0
"""Equivariant toy potential: many small kernels per step; trajectory archiving runs beside it."""
import sys
import threading
import zlib

if "--archive" in sys.argv:            # archiver process: no torch needed
    import ctypes
    import signal
    import time
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except Exception:
        pass

    def pack(seed):
        data = bytes((i * seed * 31 + (i >> 3)) & 255 for i in range(1 << 18))
        while True:
            zlib.compress(data, 9)

    sys.stdin.readline()
    for k in range(int(sys.argv[sys.argv.index("--archive") + 1])):
        threading.Thread(target=pack, args=(k + 3,), daemon=True).start()
    while True:
        time.sleep(1)

import os
import subprocess
import torch
from rig import Kit, DEV


class Potential(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.radial = torch.nn.ModuleList([torch.nn.Linear(16, width) for _ in range(depth)])
        self.mix = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])
        self.energy = torch.nn.Linear(width, 1)
        self.centres = torch.nn.Parameter(torch.linspace(0, 4, 16))

    def forward(self, pos):
        gap = pos[:, None] - pos[None]
        dist = (gap.square().sum(-1) + 1e-3).sqrt()
        basis = torch.exp(-(dist[..., None] - self.centres).square())
        h = 0.0
        for r, m in zip(self.radial, self.mix):
            msg = torch.tanh(r(basis)).sum(1)
            h = torch.tanh(m(msg)) + h
        return self.energy(h).sum()


def relax(net, pos, opt, target):
    pos = pos.detach().requires_grad_()
    e = net(pos)
    force, = torch.autograd.grad(e, pos, create_graph=True)
    loss = (force - target).square().mean() + 1e-4 * e.square()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    return loss.item()


def start_archivers(kit, processes, threads):
    """packs the frames of finished trajectories"""
    team = []
    for _ in range(processes):
        team.append(kit.child(subprocess.Popen([sys.executable, __file__, "--archive", str(threads)],
                                               stdin=subprocess.PIPE)))
    return team


def main():
    kit = Kit(__file__)
    rng = kit.rng
    atoms = kit.n(rng.choice([48, 64, 80]), 6)
    net = Potential(kit.n(rng.choice([64, 96, 128]), 8), kit.n(rng.choice([5, 6, 7]), 2)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 1e-4, foreach=False)
    pos = torch.randn(atoms, 3, device=DEV)
    target = torch.randn(atoms, 3, device=DEV) * 0.1
    share = kit.share(0.68, 0.94, 1.08)
    cores = len(os.sched_getaffinity(0))
    processes = kit.n(rng.choice([4, 5, 6]), 1)
    threads = kit.n(max(2, round(cores / (1 - share) / processes)), 2)
    team = start_archivers(kit, processes, threads)
    kit.ablate.append(kit.wipe)
    kit.cause("cpu_starvation", kit.place(start_archivers, "subprocess.Popen"),
              "archivers keep more threads than there are cores", "archiver processes")
    going = False
    for i in kit.steps(warm=40):
        if kit.on and not going:
            for p in team:
                p.stdin.write(b"\n")
                p.stdin.flush()
            going = True
        relax(net, pos, opt, target)


if __name__ == "__main__":
    main()
