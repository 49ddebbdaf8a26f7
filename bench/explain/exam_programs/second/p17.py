# SPDX-License-Identifier: Apache-2.0
"""Features of video frames are extracted for later use."""
import collections
import torch
from rig import Kit, ConvNet, DEV


class Shelf:
    def __init__(self):
        self.kept = collections.deque(maxlen=4)

    def put(self, maps):
        self.kept.append(maps.cpu())


@torch.no_grad()
def main(kit):
    side, bs = kit.n(128, 16), kit.n(kit.rng.choice([64, 96]), 2)
    net = ConvNet(kit.n(128, 8), kit.n(kit.rng.choice([8, 10]), 1)).to(DEV).eval()
    x = torch.randn(bs, 3, side, side, device=DEV)
    shelf = Shelf()
    base, _ = kit.measure(lambda: net.body(x))
    maps = net.body(x).flatten()
    part = maps[:max(1, maps.numel() // 8)]
    unit, _ = kit.measure(lambda: shelf.put(part), 10)
    s = kit.share(0.45)
    want = min(maps.numel(), max(1, int(part.numel() * base * s / (1 - s) / unit)))
    kit.cause("copies", kit.place(Shelf.put, "maps.cpu()"), "%d values go to pageable host memory each step" % want)
    del part, maps
    for _ in kit.steps():
        h = net.body(x).flatten()
        if kit.on:
            shelf.put(h[:want])


if __name__ == "__main__":
    main(Kit(__file__))
