# SPDX-License-Identifier: Apache-2.0
"""Embedding refresh job: pulls permits from a quota keeper, encodes documents, refreshes a large memory bank."""
import threading
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Job


class Quota:
    """A token bucket: one permit per batch, refilled by the clock."""

    def __init__(self):
        self.gap = 0.0
        self.last = 0.0

    def permit(self):
        if self.gap <= 0:
            return
        due = time.perf_counter() + self.gap
        while time.perf_counter() < due:
            time.sleep(0.0005)
        self.last = due


class MemoryBank:
    def __init__(self, job, n, d):
        self.m = torch.randn(n, d, device=job.dev)
        self.part = 0

    def normalise(self, fresh, at):
        # only the new rows need it, `part` further rows are normalised again
        fresh = F.normalize(fresh.float(), dim=1)
        self.m[at:at + fresh.shape[0]] = fresh
        if self.part:
            rows = self.m[:self.part]
            rows.div_(rows.norm(dim=1, keepdim=True).clamp_(min=1e-6))

    def nearest(self, q):
        return (q.float() @ self.m[:4096].T).amax(1)


def main():
    job = Job(0.24, 0.44)
    d = 512 if job.cuda else 16
    n = 1_500_000 if job.cuda else 3000
    bank = MemoryBank(job, n, d)
    quota = Quota()
    enc = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))])
    enc = enc.to(job.dev, job.half).eval()
    docs = torch.randn(job.pick(8192, 12288, 16384, tiny=32), d, device=job.dev, dtype=job.half)
    i, reps = [0], [1]
    threading.Thread(target=threading.Event().wait, name="DataLoader-0", daemon=True).start()

    @torch.no_grad()
    def step():
        quota.permit()
        h = docs
        for _ in range(reps[0]):
            h = enc(h)
        i[0] = (i[0] + docs.shape[0]) % (n - docs.shape[0])
        bank.normalise(h, i[0])
        s = bank.nearest(h)
        return float(s[0])

    job.size(step, lambda k: reps.__setitem__(0, k), 2, job.rng.uniform(8, 14), 60)
    need = job.share / (1 - job.share)
    mix = job.rng.uniform(0.4, 0.6)
    a, b = need * mix, need * (1 - mix)
    job.tune(step, lambda k: setattr(bank, "part", min(int(k), n)), n // 3, n, share=a / (1 + a), rounds=5)
    job.tune(step, lambda k: setattr(quota, "gap", float(k)), 0.002, 0.1, share=b / (1 + a + b), rounds=5)

    def off():
        bank.part = 0
        quota.gap = 0.0

    job.show(step, off, [("sleep_or_remote_wait", "Quota.permit"), ("device_memory_bandwidth", "MemoryBank.normalise")],
             parts={"device_memory_bandwidth": round(a / (1 + need), 3), "sleep_or_remote_wait": round(b / (1 + need), 3)})


if __name__ == "__main__":
    main()
