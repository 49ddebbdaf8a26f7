# SPDX-License-Identifier: Apache-2.0
"""Token generation with replayed graphs: the network is cut into segments, each kept as one graph per width bucket."""
from stage import Dial, arguments, conduct

import torch


class Segment:
    def __init__(self, batch, dim, depth, device, dtype, bus):
        self.bus, self.depth = bus, depth
        self.up = torch.randn(dim, dim, device=device, dtype=dtype) * dim ** -0.5
        self.mid = torch.empty(batch, dim, device=device, dtype=dtype)
        self.graph = None

    def body(self):
        for _ in range(self.depth):
            torch.mm(self.bus, self.up, out=self.mid)
            self.mid.relu_()
            self.bus.lerp_(self.mid, 0.1)

    def run(self):
        if self.graph is None:
            self.body()
        else:
            self.graph.replay()


class Generator:
    def __init__(self, device, dtype, batch, dim, segments, depth, vocabulary, amount):
        self.device, self.amount = device, amount
        self.bus = torch.randn(batch, dim, device=device, dtype=dtype)
        self.table = torch.randn(vocabulary, dim, device=device, dtype=dtype)
        self.parts = [Segment(batch, dim, depth, device, dtype, self.bus) for _ in range(segments)]
        self.shadow = torch.empty_like(self.bus)
        self.length = 0
        if device == "cuda":
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for part in self.parts[:2]:
                    part.body()
            torch.cuda.synchronize()
            self.free_buffers(len(self.parts))

    def free_buffers(self, count):
        for part in self.parts[:count]:
            if self.device == "cpu":
                part.body()
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool)
                part.body()
                graph.capture_end()
            part.graph = graph

    def token(self):
        count = min(self.amount(), len(self.parts))
        if count:
            self.free_buffers(count)
        for part in self.parts:
            part.run()
        best = (self.bus @ self.table.t()).argmax(1)
        self.bus.copy_(self.table[best])
        self.length += 1
        return best.tolist()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    with torch.no_grad():
        if args.smoke:
            dial = Dial(4, hi=64, whole=True)
            work = Generator(args.device, torch.float32, 8, 64, 64, 4, 128, dial)
        else:
            dial = Dial(20, hi=96, whole=True)
            work = Generator(args.device, torch.bfloat16, 1024, 2048, 96, 8, 32000, dial)
        conduct(args, work.token, [dial])


if __name__ == "__main__":
    main()
