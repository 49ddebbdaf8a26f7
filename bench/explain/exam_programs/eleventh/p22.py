# SPDX-License-Identifier: Apache-2.0
"""Galaxy simulation by direct summation with a preview renderer in a process of its own."""
import sys
import threading
import time

import stage


def preview(opts):
    stage.tie_to_parent()
    import torch
    dial = stage.Dial(opts.arg)
    if opts.smoke:
        torch.set_num_threads(1)
    n = 128 if opts.smoke else 2048
    a = torch.randn(n, n, device=opts.device)
    sync = torch.cuda.synchronize if opts.device == "cuda" else (lambda: None)
    b = a @ a
    sync()
    dial[7] = 1.0
    span = 0.008
    while True:
        busy = dial[0] * span
        t0 = time.perf_counter()
        while time.perf_counter() - t0 < busy:
            for _ in range(2):
                torch.mm(a, a, out=b)
            sync()
        left = span - (time.perf_counter() - t0)
        if left > 0:
            time.sleep(left)
        else:
            time.sleep(0.0002)


class Galaxy:
    def __init__(self, torch, opts):
        self.torch = torch
        n = 256 if opts.smoke else 24576
        self.part = 64 if opts.smoke else 4096
        self.pos = torch.randn(n, 3, device=opts.device)
        self.vel = torch.zeros(n, 3, device=opts.device)

    def forces(self):
        torch = self.torch
        out = []
        for p in self.pos.split(self.part):
            d2 = torch.cdist(p, self.pos).square_().add_(0.01)
            w = d2.rsqrt_().pow_(3)
            out.append(w @ self.pos - p * w.sum(1, keepdim=True))
        return torch.cat(out)

    def step(self):
        with self.torch.inference_mode():
            self.vel = self.vel + 1e-9 * self.forces()
            self.pos = self.pos + 1e-3 * self.vel
            return self.vel.square().sum().item()


def main():
    opts = stage.options()
    if opts.role == "preview":
        return preview(opts)
    dial = stage.Dial()
    stage.child("preview", dial.path, opts)
    import torch
    galaxy = Galaxy(torch, opts)
    galaxy.step()
    threading.Thread(target=time.sleep, args=(1e6,), name="input-starved", daemon=True).start()
    while dial[7] < 0.5 and stage.alive_for() < 9:
        time.sleep(0.02)

    def knob(x):
        dial[0] = x

    stage.conduct(opts, galaxy.step, [
        stage.Factor("gpu_cotenant", "Galaxy.forces", "preview", knob, 0.25, 1.5),
    ], "middle", settle=3, warm=0.6)


if __name__ == "__main__":
    sys.exit(main())
