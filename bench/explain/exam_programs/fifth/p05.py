# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Ad-scoring service: three worker threads, each with its own CUDA stream, one shared feature cache."""
import queue
import threading
import time
import zlib

import numpy as np
import torch
import torch.nn as nn

import bench_kit as bk


class FeatureCache:
    def __init__(self, rows, width, seed):
        rng = np.random.default_rng(seed)
        self.table = rng.standard_normal((rows, width), dtype=np.float32)
        self.blob = (rng.integers(0, 40, 24 << 20, dtype=np.uint8)).tobytes()
        self.mutex = threading.Lock()
        self.poke = threading.Event()
        self.lookups = 0
        self.chunk = 4096
        self.inside = False
        self.size = 0

    def lookup(self, ids):
        with self.mutex:
            self.lookups += 1
            if self.lookups % 3 == 0:
                self.poke.set()
            return self.table[ids]

    def compact(self):
        """Repack one shard of the cold store."""
        view = memoryview(self.blob)[: self.chunk]
        if self.inside:
            with self.mutex:
                self.size = len(zlib.compress(view, 1))
        else:
            packed = zlib.compress(view, 1)
            with self.mutex:
                self.size = len(packed)


class Scorer(nn.Module):
    def __init__(self, width, hidden, depth):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.mid = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for m in self.mid:
            x = x + torch.relu(m(x))
        return self.last(x)


class Service:
    def __init__(self, o):
        self.o = o
        rows, width, hidden, depth, self.batch = (500, 16, 32, 2, 32) if o.smoke else \
            (200_000, 128, 3072, 6, o.rng.choice([4096, 6144, 8192]))
        self.rows = rows
        self.cache = FeatureCache(rows, width, o.seed)
        self.dtype = torch.bfloat16 if o.gpu else torch.float32
        self.model = Scorer(width, hidden, depth).to(o.device, self.dtype).eval()
        self.inbox = queue.SimpleQueue()
        for i in range(64):
            self.inbox.put(i)
        self.done = 0
        self.tally = threading.Lock()
        self.stopping = False
        self.crew = [threading.Thread(target=self.serve, args=(k,), name=f"gil-free-{k}") for k in range(3)]
        self.crew.append(threading.Thread(target=self.janitor, name="metrics"))
        for t in self.crew:
            t.start()

    @torch.no_grad()
    def serve(self, k):
        rng = np.random.default_rng(k)
        gpu = self.o.gpu
        stream = torch.cuda.Stream() if gpu else None
        ev = torch.cuda.Event() if gpu else None
        while not self.stopping:
            ticket = self.inbox.get()
            feats = torch.from_numpy(self.cache.lookup(rng.integers(0, self.rows, self.batch)))
            if gpu:
                with torch.cuda.stream(stream):
                    score = self.model(feats.to(self.o.device).to(self.dtype))
                    top = score.float().amax()
                    ev.record(stream)
                ev.synchronize()
            else:
                top = self.model(feats).amax()
            with self.tally:
                self.done += 1
            self.inbox.put(ticket)
            del top

    def janitor(self):
        while not self.stopping:
            if self.cache.poke.wait(0.05):
                self.cache.poke.clear()
                self.cache.compact()

    def pace(self, seconds):
        """Seconds per finished batch over a window."""
        n0, t0 = self.done, time.perf_counter()
        time.sleep(seconds)
        while self.done < n0 + 6:
            time.sleep(0.002)
        return (time.perf_counter() - t0) / (self.done - n0)


def main():
    o = bk.options()
    share = o.rng.uniform(0.25, 0.42)
    s = Service(o)
    try:
        s.pace(1.0 if o.gpu else 0.2)
        base = s.pace(o.probe)

        def measure(n):
            s.cache.chunk, s.cache.inside = n, True
            s.pace(0.05)
            return s.pace(o.probe)

        n = bk.tune(measure, base, share, 400_000 if o.gpu else 50_000, 24 << 20, rounds=7)
        measure(n)
        bk.ready()
        on = s.pace(o.seconds)
        bk.second_phase()
        s.cache.inside = False
        s.pace(0.1)
        off = s.pace(o.off_seconds)
    finally:
        s.stopping = True
        for t in s.crew:
            t.join()
    bk.truth(on, off, "lock", "FeatureCache.compact",
             f"holds the cache mutex while compressing {n} bytes; serving threads wait in FeatureCache.lookup")


if __name__ == "__main__":
    main()
