# SPDX-License-Identifier: Apache-2.0
"""Flow past a cylinder: a D2Q9 lattice-Boltzmann channel, drag read once per output step."""
import kit
import os
import subprocess
import sys
import time

if "--probe" in sys.argv:
    kit.bond()
    DIAL = kit.Dial(sys.argv[sys.argv.index("--probe") + 1])
else:
    DIAL = kit.Dial()
    PROBE = subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--probe", DIAL.path],
                             stdout=subprocess.DEVNULL)
import torch


def probe():
    """Bursts of products, then a rest."""
    device = torch.device("cpu" if "--smoke" in sys.argv or "--rehearse" in sys.argv else "cuda")
    torch.set_num_threads(1)
    n = 64 if device.type == "cpu" else 2048
    a = torch.randn(n, n, device=device)
    b = a @ a
    DIAL[1] = 1.0
    while True:
        duty = min(1.0, DIAL[0])
        if duty <= 0.0:
            time.sleep(0.002)
            continue
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.016 * duty:
            torch.mm(a, a, out=b)
            if device.type == "cuda":
                torch.cuda.synchronize()
        if duty < 1.0:
            time.sleep(0.016 * (1.0 - duty))


class Channel:
    E = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    W = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
    BACK = [0, 3, 4, 1, 2, 7, 8, 5, 6]

    def __init__(self, stage, nx, ny):
        d = stage.device
        self.device = d
        self.w = torch.tensor(self.W, device=d).view(9, 1, 1)
        self.e = torch.tensor(self.E, device=d, dtype=torch.float32)
        y, x = torch.meshgrid(torch.arange(ny, device=d), torch.arange(nx, device=d), indexing="ij")
        self.solid = ((x - nx // 5) ** 2 + (y - ny // 2) ** 2) < (ny // 9) ** 2
        self.f = self.w * torch.ones(9, ny, nx, device=d)
        self.f[1] *= 1.1
        self.push = torch.zeros((), device=d)
        self.back = torch.tensor(self.BACK, device=d)

    def march(self, n):
        for _ in range(n):
            f = torch.stack([torch.roll(self.f[i], (ey, ex), (0, 1)) for i, (ex, ey) in enumerate(self.E)])
            rho = f.sum(0)
            u = torch.einsum("id,iyx->dyx", self.e, f) / rho
            eu = torch.einsum("id,dyx->iyx", self.e, u)
            uu = (u * u).sum(0)
            eq = self.w * rho * (1.0 + 3.0 * eu + 4.5 * eu * eu - 1.5 * uu)
            out = f + (eq - f) * 0.8
            self.f = torch.where(self.solid, f.index_select(0, self.back), out)
            self.push = (f[1] - f[3]).masked_fill(~self.solid, 0.0).sum()

    def drag(self):
        return self.push.item()


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("gpu_cotenant", "Channel.drag", kit.MIDDLE, start=0.4, tiny=0.2, least=0.01, most=1.0, alt="Channel.march"),
    }, "another process computes on the same device in bursts", window=0.7, settle=5)
    stage.child(PROBE)
    stage.at_end(lambda: os.unlink(DIAL.path))
    if stage.smoke:
        nx, ny, n = 40, 20, 2
    else:
        nx, ny, n = stage.pick(1536, 2048), stage.pick(640, 768), stage.pick(16, 20, 24)
    channel = Channel(stage, nx, ny)
    while DIAL[1] == 0.0 and time.perf_counter() - kit.BORN < 14.0:
        time.sleep(0.02)
    drags = []
    while True:
        DIAL[0] = stage.amount("a")
        channel.march(n)
        drags.append(channel.drag())
        if drags[-1] != drags[-1]:
            channel.f = channel.w * torch.ones_like(channel.f)
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    probe() if "--probe" in sys.argv else main()
