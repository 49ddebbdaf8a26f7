# SPDX-License-Identifier: Apache-2.0
"""Small bench rig: arguments, pacing, self-calibration, phases and the final report."""
import argparse
import collections
import json
import os
import random
import time

import torch


class Job:
    def __init__(self, lo=0.0, hi=0.0):
        p = argparse.ArgumentParser()
        p.add_argument("--seed", type=int, default=0)
        p.add_argument("--seconds", type=float, default=8.0)
        p.add_argument("--smoke", action="store_true")
        self.args, _ = p.parse_known_args()
        self.smoke = self.args.smoke
        self.rng = random.Random(self.args.seed * 7919 + 13)
        self.share = self.rng.uniform(lo, hi)
        torch.manual_seed(self.args.seed)
        self.T = min(self.args.seconds, 1.5) if self.smoke else self.args.seconds
        self.T2 = 1.0 if self.smoke else max(3.0, self.args.seconds / 2)
        self.cuda = torch.cuda.is_available() and not self.smoke
        self.dev = torch.device("cuda" if self.cuda else "cpu")
        self.half = torch.bfloat16 if self.cuda else torch.float32
        self.k = 0
        self._ring = collections.deque()
        if not self.cuda:
            torch.set_num_threads(1)

    def pick(self, *sizes, tiny=None):
        """A size by seed; the tiny one when smoke-testing."""
        c = self.rng.choice(sizes)
        return tiny if (self.smoke and tiny is not None) else c

    def fence(self):
        if self.cuda:
            torch.cuda.synchronize()

    def pace(self, depth=2):
        """Lets the host run at most `depth` steps ahead of the device."""
        if not self.cuda:
            return
        e = torch.cuda.Event()
        e.record()
        self._ring.append(e)
        while len(self._ring) > depth:
            self._ring.popleft().synchronize()

    def graph(self, fn):
        if not self.cuda:
            return fn
        s = torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(s)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            fn()
        return g.replay

    def rate(self, step, secs=0.25, settle=3, least=4):
        for _ in range(settle):
            step()
        self.fence()
        t, n = time.perf_counter(), 0
        while n < least or time.perf_counter() - t < secs:
            step()
            n += 1
        self.fence()
        return (time.perf_counter() - t) / n

    def size(self, step, setn, n0, ms, nmax, nmin=1):
        """Scales the honest work of a step (a repeat count) to about `ms` milliseconds."""
        n = n0
        for _ in range(1 if self.smoke else 3):
            setn(n)
            got = self.rate(step, 0.02 if self.smoke else 0.1, 3, 3) * 1e3
            if self.smoke:
                break
            m = max(nmin, min(nmax, int(round(n * ms / got))))
            if m == n:
                break
            n = m
        setn(n)
        return n

    def tune(self, step, setk, k0, kmax, whole=False, secs=0.25, settle=3, share=None, rounds=6, least=4):
        """Finds the knob for which the step grows by the wished share; sets and returns it."""
        s = self.share if share is None else share
        if self.smoke:
            secs, rounds, settle, least = 0.03, 2, min(settle, 3), 2
        setk(k0)
        for _ in range(settle):
            step()
        setk(0)
        base = self.rate(step, secs, settle + 2, least)
        goal = base * s / (1 - s)
        lo, hi, k, best = (0, 0.0), None, k0, None
        for _ in range(rounds):
            setk(k)
            e = self.rate(step, secs, settle, least) - base
            if best is None or abs(e - goal) < best[0]:
                best = (abs(e - goal), k)
            if abs(e - goal) <= 0.08 * goal:
                break
            if e < goal:
                lo = (k, e)
            else:
                hi = (k, e)
            if hi is None:
                nk = k * min(8.0, max(1.3, goal / e if e > 0.05 * goal else 6.0))
            else:
                f = (goal - lo[1]) / (hi[1] - lo[1]) if hi[1] > lo[1] else 0.5
                nk = lo[0] + min(0.9, max(0.1, f)) * (hi[0] - lo[0])
            nk = min(kmax, nk)
            if whole:
                nk = max(1, int(round(nk)))
            if nk == k:
                break
            k = nk
        self.k = best[1]
        setk(self.k)
        self.rate(step, 0.05, settle, 1)
        return self.k

    def ready(self, pid=None):
        print("READY " + json.dumps({"pid": pid or os.getpid()}), flush=True)

    def span(self, step, secs, settle=0):
        t_end = time.perf_counter() + secs
        for _ in range(settle):
            step()
        self.fence()
        t, n = time.perf_counter(), 0
        while True:
            step()
            n += 1
            if time.perf_counter() >= t_end and n >= 2:
                break
        self.fence()
        return (time.perf_counter() - t) / n, n

    def truth(self, on, off, causes, **more):
        d = {"lost_share": round(1 - off[0] / on[0], 4),
             "causes": [{"class": c, "place": p} for c, p in causes],
             "target_share": round(self.share, 3), "knob": self.k,
             "step_ms_with": round(on[0] * 1e3, 3), "step_ms_without": round(off[0] * 1e3, 3),
             "steps_with": on[1], "steps_without": off[1], "seed": self.args.seed}
        d.update(more)
        print("TRUTH " + json.dumps(d), flush=True)

    def show(self, step, off, causes, settle=3, **more):
        self.ready()
        a = self.span(step, self.T)
        print("PHASE2", flush=True)
        off()
        b = self.span(step, self.T2, settle)
        self.truth(a, b, causes, **more)
