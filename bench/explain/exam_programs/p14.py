# SPDX-License-Identifier: Apache-2.0
"""Physics surrogate replayed as a CUDA graph."""
import torch
from runkit import Kit, DEV


def body(parts, dt):
    for p, v in parts:
        v.add_(p, alpha=-dt).mul_(0.999)
        p.add_(v, alpha=dt)


def record(parts, dt):
    if DEV.type != "cuda":
        class Fake:
            def replay(self):
                body(parts, dt)
        return Fake()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            body(parts, dt)
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        body(parts, dt)
    return g


def main(kit):
    n, m = kit.n(kit.rng.randrange(700, 1200), 6), kit.n(kit.rng.randrange(500, 3000), 16)
    parts = [[torch.randn(m, device=DEV) for _ in range(2)] for _ in range(n)]
    s = kit.share(0.45)
    keep = max(1, int(n * (1 - s)))
    full, part = record(parts, 0.01), record(parts[:keep], 0.01)
    kit.cause("device_compute", kit.place(main, "g.replay()"), "long chain of %d small dependent kernels in a graph: the device is the limit, not the launches" % (n * 3))
    for it in kit.steps():
        g = full if kit.on else part
        g.replay()
        if it % 20 == 19:
            parts[0][0].sum().item()


if __name__ == "__main__":
    main(Kit(__file__))
