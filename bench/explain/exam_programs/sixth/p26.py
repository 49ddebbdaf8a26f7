# SPDX-License-Identifier: Apache-2.0
"""Music-model training: codes of an audio tokenizer predicted by a wide network, averaged weights kept for sampling."""
import json
import os
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p26")
BATCH = job.size([4096, 6144], 16)
DIM = job.size([1536, 2048], 16)
LAYERS = job.size([6, 8], 2)
CODES = job.size(2048, 20)


class CodeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(CODES, DIM)
        self.body = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(LAYERS))
        self.out = nn.Linear(DIM, CODES)

    def forward(self, ids):
        x = self.emb(ids)
        for n, l in zip(self.norm, self.body):
            x = x + F.silu(l(n(x)))
        return self.out(x)


class Averages:
    """Running averages of the weights at many decays; sampling reads the first."""

    def __init__(self, params):
        self.flat = torch.cat([p.detach().reshape(-1) for p in params])
        at = 0
        for p in params:
            p.data = self.flat[at:at + p.numel()].view_as(p)
            at += p.numel()
        self.avg = [self.flat.clone() for _ in range(4)]
        self.span = 0

    def all_gather(self):
        left, k = self.span, 0
        n = self.flat.numel()
        while left > 0:
            take = min(left, n)
            self.avg[k % 4][:take].lerp_(self.flat[:take], 0.001 * (k + 1) / (k + 2))
            left -= take
            k += 1


class Journal:
    def __init__(self):
        fd, self.path = tempfile.mkstemp(prefix="journal")
        self.file = os.fdopen(fd, "w")
        self.safe, self.ticks = 0.0, kit.Ticks()
        self.tail = []

    def numpy_convert(self, step, loss):
        self.tail = (self.tail + [loss])[-50:]
        for k in range(self.ticks.take(self.safe)):
            self.file.write(json.dumps({"step": step, "part": k, "loss": loss, "tail": self.tail}) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
            if self.file.tell() > 32 << 20:
                self.file.seek(0)

    def close(self):
        self.file.close()
        os.unlink(self.path)


class Studio:
    def __init__(self):
        self.net = CodeNet().to(job.dev)
        params = list(self.net.parameters())
        self.opt = torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True)
        self.avg, self.journal = Averages(params), Journal()
        self.ids = torch.randint(0, CODES, (4, BATCH), device=job.dev)
        self.n = 0

    def step(self):
        i = self.n % 4
        self.n += 1
        with torch.autocast(job.dev.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(self.ids[i]).float(), self.ids[(i + 1) % 4])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.avg.all_gather()
        self.journal.numpy_convert(self.n, loss.item())


def main():
    s = Studio()
    kit.on_close(s.journal.close)

    def safe(n, on):
        s.journal.safe = n if on else 0.0

    def span(n, on):
        s.avg.span = int(n) if on else 0
    cs = [kit.Cause("io", "Journal.numpy_convert", safe, job.share(0.17, 0.22), 0.5, 0.005, 20000),
          kit.Cause("device_memory_bandwidth", "Averages.all_gather", span, job.share(0.17, 0.22),
                    job.size(100_000_000, 20_000), 1000, 10 ** 11)]
    kit.examine(job, cs, "journal lines are fsynced within the step; weight averages at many decays are passed over in each step",
                step=s.step)


if __name__ == "__main__":
    main()
