# SPDX-License-Identifier: Apache-2.0
"""Map tiles for a game: host code grows road graphs, the device paints heights; preview encoders run next to it."""
import os, sys, time
import exam_kit
from exam_kit import Cause


class Preview:
    """Encoder process: shrinks tiles to text thumbnails."""

    def encode(self, until):
        n = 0
        while time.perf_counter() < until:
            line = bytes((i * i + n) & 255 for i in range(400))
            n = (n + sum(line)) & 65535
        return n

    def serve(self, share, period=0.02):
        while True:
            t0 = time.perf_counter()
            self.encode(t0 + share * period)
            if share < 1:
                time.sleep(max(0.0, period - (time.perf_counter() - t0)))


class TileMaker:
    def __init__(self, rng, smoke, dev):
        import random
        import torch
        self.torch = torch
        self.dev = dev
        try:                                        # the job was given one core
            core = max(os.sched_getaffinity(0))
            for tid in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(tid), {core})
        except OSError:
            pass
        self.r = random.Random(rng.randrange(1 << 30))
        self.n = 32 if smoke else rng.choice([1024, 1536])
        self.nodes = 200 if smoke else rng.choice([9000, 12000])
        self.h = torch.randn(self.n, self.n, device=dev)
        self.k = torch.randn(self.n, self.n, device=dev) / self.n
        self.crew = []
        self.causes = [Cause("cpu_starvation", "Preview.encode", self.set_crew, 0.3, 0.02, 40, also="TileMaker.grow_roads")]

    def set_crew(self, a, on):
        for p in self.crew:
            p.kill()
            p.wait()
            exam_kit._children.remove(p)
        self.crew = []
        left = a if on else 0.0
        while left > 0.01:
            self.crew.append(exam_kit.spawn(__file__, "--role", min(left, 1.0)))
            left -= 1.0
        if on:
            time.sleep(0.2)

    def grow_roads(self):
        at, roads = 0, {}
        for i in range(self.nodes):
            nxt = (at * 1103515245 + 12345 + i) & 0xFFFF
            roads.setdefault(at >> 4, []).append(nxt)
            at = nxt
        return sorted(roads)[:64]

    def step(self):
        torch = self.torch
        sites = self.grow_roads()
        with torch.no_grad():
            rows = torch.tensor(sites).to(self.dev) % self.n
            self.h[rows] += 0.01
            for _ in range(3):
                self.h = torch.tanh(self.h @ self.k + 0.1 * self.h)
            return self.h.amax().item()

    def close(self):
        self.set_crew(0, False)


if __name__ == "__main__":
    if "--role" in sys.argv:
        exam_kit.die_with_parent()
        Preview().serve(float(sys.argv[-1]))
    else:
        exam_kit.main(TileMaker, "mid", "encoder processes compute on the one core that the job is pinned to")
