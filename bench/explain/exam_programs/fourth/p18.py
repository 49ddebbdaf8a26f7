# SPDX-License-Identifier: Apache-2.0
"""Masked-patch pretraining; a journal of the optimiser's scalars and a weight slice is kept on disk."""
import os
import shutil
import tempfile
import threading
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Job


class Ledger:
    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="run_")
        self.slice = None
        self.amount = 0
        self.n = 0

    def commit(self, scalar):
        self.n += 1
        if self.amount <= 0:
            return
        path = os.path.join(self.dir, "j%d" % (self.n % 4))
        with open(path, "wb") as f:
            f.write(b"%d\n" % self.n)
            f.write(memoryview(self.slice)[:self.amount])
            f.flush()
            os.fsync(f.fileno())

    def wipe(self):
        shutil.rmtree(self.dir, ignore_errors=True)


class Mae(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.inp = nn.Linear(768, d)
        self.enc = nn.ModuleList(nn.TransformerEncoderLayer(d, max(1, d // 64), 4 * d, dropout=0.0, batch_first=True)
                                 for _ in range(n))
        self.out = nn.Linear(d, 768)

    def forward(self, p, mask):
        h = self.inp(p * mask)
        for e in self.enc:
            h = e(h)
        return F.mse_loss(self.out(h).float(), p.float())


def all_reduce_mean(v):
    return v.detach() / 1.0


def main():
    job = Job(0.11, 0.19)
    net = Mae(job.pick(512, 768, tiny=32), job.pick(5, 6, 8, tiny=1)).to(job.dev, job.half)
    opt = torch.optim.SGD(net.parameters(), lr=1e-4)
    p = torch.randn(job.pick(96, 128, tiny=2), 196, 768, device=job.dev, dtype=job.half)
    mask = (torch.rand(p.shape[0], 196, 1, device=job.dev) > 0.75).to(job.half)
    book = Ledger()
    book.slice = bytes(64_000_000 if job.cuda else 1_000_000)
    threading.Thread(target=threading.Event().wait, name="pin_memory_loop", daemon=True).start()

    def step():
        loss = net(p, mask)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        v = all_reduce_mean(loss)
        job.fence()
        book.commit(v)

    def setk(k):
        book.amount = int(k)

    try:
        job.tune(step, setk, 500_000, len(book.slice))
        job.show(step, lambda: setk(0), [("io", "Ledger.commit")])
    finally:
        book.wipe()


if __name__ == "__main__":
    main()
