# SPDX-License-Identifier: Apache-2.0
"""Traffic-camera detector trainer in a container with one core per job; feature miners run beside it."""
import multiprocessing as mp
import os
import time

ctx = mp.get_context("fork")


def mine(level, stop, cpu):
    """Hard-example miner: scores hashes in pure Python."""
    os.sched_setaffinity(0, {cpu})
    x = 1
    while not stop.value:
        share = level.value
        if share <= 0:
            time.sleep(0.01)
            continue
        t = time.perf_counter()
        while time.perf_counter() - t < 0.012 * share:
            for _ in range(500):
                x = (x * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        if share < 1:
            time.sleep(0.012 * (1 - share))


def main():
    level, stop = ctx.Value("d", 0.0, lock=False), ctx.Value("i", 0, lock=False)
    cpus = sorted(os.sched_getaffinity(0))
    cpu = cpus[len(cpus) // 2]
    kids = [ctx.Process(target=mine, args=(level, stop, cpu), name="render-%d" % i, daemon=True) for i in range(4)]
    for k in kids:
        k.start()

    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from rig import Job
    job = Job(0.46, 0.68)
    c = job.pick(96, 128, tiny=8)

    class Fpn(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, c, 7, 2, 3)
            self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(8, c), nn.SiLU(),
                                                    nn.Conv2d(c, c, 3, padding=1)) for _ in range(8))
            self.out = nn.Conv2d(c, 16, 1)

        def forward(self, x):
            x = self.stem(x)
            for i, b in enumerate(self.body):
                x = F.relu(x + b(x))
                if i % 3 == 2:
                    x = F.avg_pool2d(x, 2)
            return self.out(x)

    net = Fpn().to(job.dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    side = job.pick(192, 224, tiny=32)
    img = torch.randn(job.pick(16, 24, tiny=1), 3, side, side, device=job.dev)

    def step():
        with torch.autocast(job.dev.type, torch.bfloat16, enabled=job.cuda):
            loss = net(img).float().pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    def setk(k):
        level.value = min(1.0, float(k))

    try:
        for _ in range(4):
            step()
        for tid in os.listdir("/proc/self/task"):      # the container's single core
            try:
                os.sched_setaffinity(int(tid), {cpu})
            except OSError:
                pass
        job.tune(step, setk, 0.5, 1.0, secs=0.35, rounds=5)
        job.show(step, lambda: setk(0), [("cpu_starvation", "mine")])
    finally:
        stop.value = 1
        for k in kids:
            k.join(2)
            if k.is_alive():
                k.terminate()


if __name__ == "__main__":
    main()
