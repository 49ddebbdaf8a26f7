# SPDX-License-Identifier: Apache-2.0
"""Retrieval encoder on a box that a second team's job shares."""
import multiprocessing as mp
import time
import torch
import torch.nn as nn


def tenant_main(level, up, stop, smoke):
    cuda = torch.cuda.is_available() and not smoke
    dev = "cuda" if cuda else "cpu"
    a = torch.randn(4096 if cuda else 32, 4096 if cuda else 32, device=dev, dtype=torch.bfloat16 if cuda else torch.float32)
    fence = torch.cuda.synchronize if cuda else (lambda: None)
    a @ a
    fence()
    up.set()
    while not stop.is_set():
        share = level.value
        t = time.perf_counter()
        if share <= 0:
            time.sleep(0.003)
            continue
        while time.perf_counter() - t < share * 0.02:
            for _ in range(3):
                a @ a
            fence()
        time.sleep(max(0.0, 0.02 * (1 - share)))


class Encoder(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, max(1, d // 64), 4 * d, dropout=0.0, batch_first=True,
                                                               norm_first=True) for _ in range(n))

    def forward(self, x):
        for l in self.layers:
            x = l(x)
        return nn.functional.normalize(x.mean(1), dim=-1)


def read_from_disk(q, bank):
    # scores against the resident document vectors
    return (q @ bank.T).topk(4)


def main():
    ctx = mp.get_context("spawn")
    level, up, stop = ctx.Value("d", 0.0, lock=False), ctx.Event(), ctx.Event()
    import sys
    child = ctx.Process(target=tenant_main, args=(level, up, stop, "--smoke" in sys.argv), daemon=True)
    child.start()
    from rig import Job
    job = Job(0.21, 0.4)
    d = job.pick(768, 1024, tiny=32)
    net = Encoder(d, job.pick(4, 6, tiny=1)).to(job.dev, job.half)
    x = torch.randn(job.pick(32, 48, tiny=2), job.pick(384, 512, tiny=8), d, device=job.dev, dtype=job.half)
    bank = torch.randn(100_000 if job.cuda else 100, d, device=job.dev, dtype=job.half)

    opt = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step():
        q = net(x)
        loss = (q @ q.T).float().logsumexp(1).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        with torch.no_grad():
            read_from_disk(q.detach(), bank)
        job.pace(2)

    def setk(k):
        level.value = min(1.0, float(k))

    try:
        for _ in range(3):
            step()
        up.wait(30)
        job.tune(step, setk, 0.4, 1.0, secs=0.3)
        job.show(step, lambda: setk(0), [("gpu_cotenant", "tenant_main")])
    finally:
        stop.set()
        child.join(5)
        if child.is_alive():
            child.terminate()


if __name__ == "__main__":
    main()
