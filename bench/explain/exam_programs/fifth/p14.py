# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Exact nearest-neighbour service: every query block is scored against the whole corpus in device memory."""
import threading

import torch

import bench_kit as bk


class Corpus:
    def __init__(self, o):
        n, d = (4096, 16) if o.smoke else (o.rng.choice([10, 12, 14]) << 20, 256)
        self.dtype = torch.float16 if o.gpu else torch.float32
        self.group = 256
        self.rows = torch.empty(n, d, device=o.device, dtype=self.dtype)
        for a in range(0, n, 1 << 20):
            self.rows[a: a + (1 << 20)].normal_()

    def score(self, queries):
        s = self.rows @ queries.t()                               # (n, q)
        return s.view(-1, self.group, queries.shape[0]).amax(1)   # best of each group


class Ticket:
    def __init__(self, q, k, gpu):
        self.values = torch.empty(k, q, pin_memory=gpu)
        self.groups = torch.empty(k, q, dtype=torch.long, pin_memory=gpu)
        self.ready = torch.cuda.Event() if gpu else None


class SearchService:
    def __init__(self, o):
        self.o, q, k = o, 8, 10
        self.corpus = Corpus(o)
        d = self.corpus.rows.shape[1]
        host = torch.randn(16, q, d).to(self.corpus.dtype)
        self.queries = host.pin_memory() if o.gpu else host
        self.tickets = [Ticket(q, k, o.gpu) for _ in range(3)]
        self.k, self.n = k, 0
        self.answered = 0

    def wait_for_lock(self, t):
        """Take the answer of two blocks ago."""
        if t.ready is not None:
            t.ready.synchronize()
        self.answered += t.groups.shape[1]

    @torch.no_grad()
    def block(self):
        q = self.queries[self.n % 16].to(self.o.device, non_blocking=True)
        best = self.corpus.score(q).float().topk(self.k, dim=0)
        t = self.tickets[self.n % 3]
        t.values.copy_(best.values, non_blocking=True)
        t.groups.copy_(best.indices, non_blocking=True)
        if t.ready is not None:
            t.ready.record()
        self.n += 1
        if self.n >= 3:
            self.wait_for_lock(self.tickets[self.n % 3])


def main():
    o = bk.options()
    s = SearchService(o)
    evt = threading.Event()
    idle = threading.Thread(target=evt.wait, name="gc-collector", daemon=True)
    idle.start()
    bk.mean_step(s.block, 0.2 if o.smoke else 1.0, o.device)
    on, off = bk.two_phases(s.block, o, lambda: None, lambda: None)
    evt.set()
    bk.truth(on, off, "healthy", "", "bandwidth-bound scan of the corpus; both phases are the same work")


if __name__ == "__main__":
    main()
