# SPDX-License-Identifier: Apache-2.0
"""Segmentation inference on frames held in host memory."""
import torch
from runkit import Kit, ConvNet, DEV


def upload(frame):
    return frame.to(DEV)


def main(kit):
    side, bs = kit.n(128, 12), kit.n(kit.rng.choice([24, 32]), 2)
    net = ConvNet(kit.n(128, 8), kit.n(6, 1)).to(DEV).eval()
    x0 = torch.rand(bs, 3, side, side, device=DEV)

    @torch.no_grad()
    def infer(x):
        return net(x[:bs]).argmax(1).cpu()

    base, _ = kit.measure(lambda: infer(x0))
    s = kit.share(0.38)
    probe = torch.rand(4 * bs, 3, side, side)
    per = kit.unit(lambda: upload(probe)) / (4 * bs)
    rows = int(max(bs, min(2e9 / 12 / side ** 2, base * s / (1 - s) / per)))
    frames = [torch.rand(rows, 3, side, side) for _ in range(2)]
    kit.cause("copies", kit.place(upload, "frame.to"), "%d MB a step from pageable host memory" % (frames[0].nbytes >> 20))
    for it in kit.steps():
        infer(upload(frames[it % 2]) if kit.on else x0)


if __name__ == "__main__":
    main(Kit(__file__))
