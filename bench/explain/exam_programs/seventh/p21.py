# SPDX-License-Identifier: Apache-2.0
"""Epidemic model: many regions, mobility between them, an exporter thread takes the curve of each day."""
import concurrent.futures, time
import torch
import exam_kit
from exam_kit import Cause


class Regions:
    def __init__(self, n, groups, dev):
        self.s = torch.rand(n, groups, device=dev) * 0.5 + 0.5
        self.i = torch.rand(n, groups, device=dev) * 0.01
        self.beta = torch.rand(n, 1, device=dev) * 0.3
        self.beta_list = self.beta.flatten().tolist()
        self.singly = 0

    def poll_results(self, k):
        for r in range(k):
            s, i = self.s[r], self.i[r]
            new = self.beta_list[r] * s * i
            s.sub_(new)
            i.add_(new).mul_(0.95)

    def infect(self):
        k = self.singly
        if k:
            self.poll_results(k)
        new = self.beta[k:] * self.s[k:] * self.i[k:]
        self.s[k:] -= new
        self.i[k:] += new
        self.i[k:] *= 0.95


class Exporter:
    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kernel-launch")
        self.days = []
        self.every = 0.0

    def note(self, v):
        self.days.append(v)
        if len(self.days) > 1000:
            self.days.clear()
        return len(self.days)

    def launch_regions(self, v):
        f = self.pool.submit(self.note, v)
        if self.every:
            while True:
                time.sleep(self.every)
                if f.done():
                    break
        return f.result()


class Epidemic:
    def __init__(self, rng, smoke, dev):
        n, groups = (64, 8) if smoke else (rng.choice([12288, 14336]), 512)
        self.reg = Regions(n, groups, dev)
        self.move = torch.rand(n, n, device=dev)
        self.move /= self.move.sum(1, keepdim=True)
        self.days = 1 if smoke else 4
        self.exp = Exporter()
        self.causes = [Cause("launch_overhead", "Regions.poll_results", self.set_singly, 10 if smoke else 100, 1, n - 1, integer=True),
                       Cause("sleep_or_remote_wait", "Exporter.launch_regions", self.set_every, 0.004, 0.0002, 0.5)]

    def set_singly(self, a, on):
        self.reg.singly = int(a) if on else 0

    def set_every(self, a, on):
        self.exp.every = a if on else 0.0

    @torch.no_grad()
    def step(self):
        self.reg.infect()
        for _ in range(self.days):
            self.reg.i = self.move @ self.reg.i
        v = self.reg.i.mean().item()
        if v < 1e-6:
            self.reg.s.fill_(0.9)
            self.reg.i.fill_(0.01)
        self.exp.launch_regions(v)


if __name__ == "__main__":
    exam_kit.main(Epidemic, "pair", "regions updated one by one with tiny kernels; the exporter's answer is polled on a timer")
