# SPDX-License-Identifier: Apache-2.0
"""Forecasting of electricity load: dilated convolutions; a companion process checks the newest weights on held-out weeks."""
import sys
import threading
import time
import exam_kit as kit

COMPANION = "--companion" in sys.argv
if COMPANION:
    kit.die_with_parent()
import torch
import torch.nn as nn
import torch.nn.functional as F

job = kit.Job("p21", threads=2)
SERIES = job.size([384, 512], 4)
HOURS = job.size([672, 840], 24)
CH = job.size([96, 128], 8)
DEPTH = job.size([8, 10], 2)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv1d(4, CH, 1)
        self.convs = nn.ModuleList(nn.Conv1d(CH, CH, 3, padding=2 ** (i % 5), dilation=2 ** (i % 5)) for i in range(DEPTH))
        self.out = nn.Conv1d(CH, 1, 1)

    def forward(self, x):
        x = self.inp(x)
        for c in self.convs:
            x = x + F.gelu(c(x))
        return self.out(x)


class HeldOut:
    """The companion: so many forecast passes per look, told over stdin."""

    def __init__(self):
        self.net = Forecaster().to(job.dev).eval()
        self.x = torch.randn(max(SERIES // 8, 1), 4, HOURS, device=job.dev)
        self.passes = 0.0
        self.ticks = kit.Ticks()
        threading.Thread(target=self.orders, daemon=True).start()

    def orders(self):
        for line in sys.stdin:
            self.passes = float(line)
        import os
        os._exit(0)

    @torch.no_grad()
    def check(self):
        for _ in range(self.ticks.take(self.passes)):
            self.net(self.x)
        job.sync()

    def run(self):
        self.net(self.x)
        job.sync()
        print("up", flush=True)
        while True:
            self.check()
            time.sleep(0.004)


class Trainer:
    def __init__(self):
        self.net = Forecaster().to(job.dev)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3, foreach=True)
        self.x = torch.randn(4, SERIES, 4, HOURS, device=job.dev)
        self.y = torch.randn(4, SERIES, 1, HOURS, device=job.dev)
        self.n = 0

    def allreduce_like_step(self):
        i = self.n % 4
        self.n += 1
        loss = F.smooth_l1_loss(self.net(self.x[i]), self.y[i])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()


def main():
    if COMPANION:
        HeldOut().run()
        return
    import subprocess
    p = kit.child(["--companion", "--seed", job.seed] + (["--smoke"] if job.smoke else []), stdin=subprocess.PIPE,
                  stdout=subprocess.PIPE, text=True)
    t = Trainer()
    p.stdout.readline()

    def passes(n, on):
        p.stdin.write(f"{n if on else 0.0}\n")
        p.stdin.flush()
        time.sleep(0.03)
    c = kit.Cause("gpu_cotenant", "HeldOut.check", passes, job.share(0.23, 0.31), 1.0, 0.05, 2000)
    kit.examine(job, [c], "a child process evaluates on the same card; Trainer.allreduce_like_step gets slower", window=0.8,
                step=t.allreduce_like_step)


if __name__ == "__main__":
    main()
