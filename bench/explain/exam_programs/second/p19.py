# SPDX-License-Identifier: Apache-2.0
"""Two-branch model: a recurrent branch and a wide branch on streams of their own."""
import contextlib
import torch
from rig import Kit, DEV

CUDA = DEV.type == "cuda"


class Branch:
    """many short dependent steps, captured once"""
    def __init__(self, kit, n):
        d = kit.n(128, 8)
        self.h, self.w, self.n = torch.zeros(16, d, device=DEV), torch.randn(d, d, device=DEV) / d ** 0.5, n
        self.stream = torch.cuda.Stream(priority=-1) if CUDA else None
        self.ready = [torch.cuda.Event() for _ in range(2)] if CUDA else None
        self.play = kit.graph(self.roll, stream=self.stream)

    def roll(self):
        h = self.h
        for _ in range(self.n):
            h = torch.tanh(h @ self.w)
        self.h.copy_(h)

    def go(self, it, after):
        with torch.cuda.stream(self.stream) if CUDA else contextlib.nullcontext():
            if after is not None:
                self.stream.wait_event(after)
            self.play()
            if CUDA:
                self.ready[it % 2].record(self.stream)

    def join(self, which):
        if CUDA:
            torch.cuda.current_stream().wait_event(self.ready[which % 2])


@torch.no_grad()
def main(kit):
    d, rows = kit.n(2048, 16), kit.n(kit.rng.choice([2048, 3072, 4096]), 8)
    dt = torch.bfloat16 if CUDA else torch.float32
    ws = [torch.randn(d, d, device=DEV, dtype=dt) / d ** 0.5 for _ in range(kit.n(60, 2))]
    x0 = torch.randn(rows, d, device=DEV, dtype=dt)

    def wide():
        x = x0
        for w in ws:
            x = torch.relu(x @ w)
        return x

    base, _ = kit.measure(wide)
    probe = Branch(kit, 100)
    unit = kit.measure(probe.play)[0] / 100
    s = kit.share(0.4)
    b = Branch(kit, max(2, int(min(0.8, s / (1 - s)) * base / unit)))
    kit.cause("stream_dependency", kit.place(Branch.join, "wait_event(self.ready"), "the main stream waits for this step's side branch, which starts only after the step before; without: one step late")
    for it in kit.steps():
        before = torch.cuda.current_stream().record_event() if CUDA and kit.on else None
        b.go(it, before)
        if kit.on or it > 0:
            b.join(it if kit.on else it - 1)
        wide()


if __name__ == "__main__":
    main(Kit(__file__))
