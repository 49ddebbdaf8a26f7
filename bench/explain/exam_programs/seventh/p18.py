# SPDX-License-Identifier: Apache-2.0
"""Ad ranking server on CUDA graphs: four stages replayed per request, calibration biases refreshed now and then."""
import torch
import exam_kit
from exam_kit import Cause


class Stage:
    def __init__(self, d, layers, dev):
        self.ws = [torch.randn(d, d, device=dev) / d ** 0.5 for _ in range(layers)]
        self.bias = torch.zeros(d, device=dev)

    def body(self, x):
        for w in self.ws:
            x = torch.tanh(x @ w + self.bias)
        return x


class GraphShelf:
    """One ready graph a stage, thrown away when the stage's version changes."""

    def __init__(self, stages, b, d, dev):
        self.stages, self.dev = stages, dev
        self.x = [torch.zeros(b, d, device=dev) for _ in stages]
        self.have = [None] * len(stages)

    def await_upload(self, i):
        st, x = self.stages[i], self.x[i]
        if self.dev.type != "cuda":
            return None, st.body(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                st.body(x)
        torch.cuda.current_stream().wait_stream(side)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            y = st.body(x)
        return g, y

    def run(self, i, version, x):
        self.x[i].copy_(x)
        if self.have[i] is None or self.have[i][0] != version:
            self.have[i] = None
            self.have[i] = (version, *self.await_upload(i))
        _, g, y = self.have[i]
        if g is None:
            return self.stages[i].body(self.x[i])
        g.replay()
        return y


class Ranker:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        d = 32 if smoke else rng.choice([1024, 1280])
        self.b = 8 if smoke else 1024
        self.stages = [Stage(d, 3 if smoke else 10, dev) for _ in range(4)]
        self.shelf = GraphShelf(self.stages, self.b, d, dev)
        self.version = [0] * 4
        self.x = torch.randn(self.b, d, device=dev)
        self.bumps = 0.0
        self.credit = 0.0
        self.turn = 0
        self.causes = [Cause("recompilation", "GraphShelf.await_upload", self.set_bumps, 0.3, 0.005, 4.0)]

    def set_bumps(self, a, on):
        self.bumps = a if on else 0.0
        self.credit = 0.0

    def refresh_bias(self):
        self.turn = (self.turn + 1) % 4
        st = self.stages[self.turn]
        st.bias.mul_(0.99).add_(0.001)
        self.credit += self.bumps
        for j in range(4):
            if self.credit >= 1.0:
                self.credit -= 1.0
                self.version[(self.turn + j) % 4] += 1

    @torch.no_grad()
    def step(self):
        self.refresh_bias()
        y = self.x
        for i in range(4):
            y = self.shelf.run(i, self.version[i], y)
        return y.mean().item()


if __name__ == "__main__":
    exam_kit.main(Ranker, "high", "graphs are captured again whenever a bias is refreshed in place, though the captured graph would do")
