# SPDX-License-Identifier: Apache-2.0
"""Student training with a teacher on a second stream."""
import contextlib
import torch
from runkit import Kit, Net, DEV

CUDA = DEV.type == "cuda"


class Teacher:
    """small recurrent teacher: a serial chain of thin products"""
    def __init__(self, d):
        self.w = torch.randn(d, d, device=DEV) / d ** 0.5
        self.h = torch.randn(16, d, device=DEV)
        self.stream = torch.cuda.Stream() if CUDA else None
        self.done = torch.cuda.Event() if CUDA else None
        self.graph, self.length = None, 1

    def unroll(self, length):
        h = self.h
        for _ in range(length):
            h = torch.tanh(h @ self.w)
        return h

    def prepare(self, length):
        self.length = length
        if CUDA:
            with torch.cuda.stream(self.stream):
                self.unroll(3)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.out = self.unroll(length)
        else:
            self.out = self.unroll(1)

    def run(self):
        if not CUDA:
            self.out = self.unroll(self.length)
            return
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            self.done.record(self.stream)

    def join(self):
        if CUDA:
            torch.cuda.current_stream().wait_event(self.done)


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(8, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=True)
    x = torch.randn(kit.n(kit.rng.choice([4096, 8192]), 8), d, device=DEV)

    def step(target):
        loss = (net(x).mean(0) - target).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss

    teacher = Teacher(d)
    teacher.prepare(kit.n(100, 2))
    fixed = teacher.out.mean(0).clone()
    base, _ = kit.measure(lambda: step(fixed))
    s = kit.share(0.18)
    one = kit.measure(teacher.run)[0] / teacher.length
    teacher.prepare(int(max(1, base * s / (1 - s) / one)))
    if CUDA:
        torch.cuda.synchronize()
    kit.cause("stream_dependency", kit.place(Teacher.join, "wait_event"), "main stream waits for the teacher's stream each step before it starts")
    for it in kit.steps():
        if kit.on:
            if CUDA:
                teacher.stream.wait_stream(torch.cuda.current_stream())
            teacher.run()
            teacher.join()
            loss = step(teacher.out.mean(0))
        else:
            loss = step(fixed)
        if it % 10 == 9:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
