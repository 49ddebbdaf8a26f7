# SPDX-License-Identifier: Apache-2.0
"""Weather nowcasting (ConvLSTM); radar frames come from a courier process through shared memory slots."""
import multiprocessing as mp
from multiprocessing import shared_memory
import sys
import threading
import time

import numpy as np

SLOTS = 3


def courier_main(name, shape, full, free, rounds, quit_):
    """Reads radar frames, grids them to the model's raster and puts them into a slot."""
    mem = shared_memory.SharedMemory(name=name)
    slots = np.ndarray((SLOTS,) + shape, np.float32, buffer=mem.buf)
    r = np.random.default_rng(9)
    raw = [r.random(shape, dtype=np.float32) for _ in range(3)]
    probe = raw[0].reshape(-1)[:16384].copy()
    i = 0
    while not quit_.value:
        if not free.acquire(timeout=0.2):
            continue
        for _ in range(int(rounds.value)):
            np.log1p(np.sort(probe))
        np.copyto(slots[i % SLOTS], raw[i % 3])
        i += 1
        full.release()
    del slots
    mem.close()


class Courier:
    def __init__(self, shape):
        ctx = mp.get_context("fork")
        n = int(np.prod(shape)) * 4 * SLOTS
        self.mem = shared_memory.SharedMemory(create=True, size=n)
        self.slots = np.ndarray((SLOTS,) + shape, np.float32, buffer=self.mem.buf)
        self.full, self.free = ctx.Semaphore(0), ctx.Semaphore(SLOTS)
        self.rounds, self.quit = ctx.Value("d", 0.0, lock=False), ctx.Value("i", 0, lock=False)
        self.proc = ctx.Process(target=courier_main, daemon=True,
                                args=(self.mem.name, shape, self.full, self.free, self.rounds, self.quit))
        self.proc.start()
        self.i = 0

    def fetch(self, into):
        import torch
        self.full.acquire()
        into.copy_(torch.from_numpy(self.slots[self.i % SLOTS]))
        self.i += 1
        self.free.release()

    def close(self):
        self.quit.value = 1
        self.proc.join(3)
        if self.proc.is_alive():
            self.proc.terminate()
        del self.slots
        self.mem.close()
        self.mem.unlink()


def main():
    smoke = "--smoke" in sys.argv
    shape = (2, 4, 32, 32) if smoke else (8, 4, 128, 128)
    courier = Courier(shape)
    import torch
    import torch.nn as nn
    from rig import Job
    job = Job(0.12, 0.2)
    c = job.pick(96, 128, tiny=8)

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Conv2d(1, c, 3, padding=1)
            self.mix = nn.Conv2d(2 * c, 3 * c, 3, padding=1)
            self.out = nn.Conv2d(c, 1, 1)

        def forward(self, x):
            h = torch.zeros(x.shape[0], c, *x.shape[2:], device=x.device)
            for t in range(x.shape[1]):
                f, i, g = self.mix(torch.cat([self.inp(x[:, t:t + 1]), h], 1)).chunk(3, 1)
                h = torch.sigmoid(f) * h + torch.sigmoid(i) * torch.tanh(g)
            return self.out(h)

    net = Cell().to(job.dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    x = torch.zeros(shape, device=job.dev)
    threading.Thread(target=lambda: time.sleep(1e6), name="grad-allreduce", daemon=True).start()

    def step():
        courier.fetch(x)
        with torch.autocast(job.dev.type, torch.bfloat16, enabled=job.cuda):
            y = net(x)
        loss = (y.float() - x[:, -1:]).abs().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        job.pace(1)

    def setk(k):
        courier.rounds.value = float(int(k))

    try:
        job.tune(step, setk, 20, 5000, whole=True, settle=8)
        job.show(step, lambda: setk(0), [("input_pipeline", "courier_main")], settle=8, consumer="Courier.fetch")
    finally:
        courier.close()


if __name__ == "__main__":
    main()
