# SPDX-License-Identifier: Apache-2.0
"""Agent training with an in-memory replay of episode objects."""
import gc
import torch
from runkit import Kit, Net, DEV


class Episode:
    def __init__(self, k):
        self.meta = {"k": k, "tags": [k, k + 1]}
        self.links = [self]


def tidy(on):
    if on:
        gc.collect()


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(10, 1)).to(DEV)
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    x = torch.randn(kit.n(1024, 8), d, device=DEV)

    def improve():
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    base, _ = kit.measure(improve)
    replay = [Episode(k) for k in range(kit.n(kit.rng.choice([150_000, 250_000]), 5000))]
    s = kit.share(0.17)
    every = max(1, round(kit.unit(gc.collect, 5) / (base * s / (1 - s))))
    kit.cause("gc", kit.place(tidy, "gc.collect()"), "full collection over %d objects every %d steps" % (len(replay) * 4, every))
    gc.disable()
    count = 0
    for it in kit.steps():
        improve()
        count += 1
        if count % every == 0:
            tidy(kit.on)


if __name__ == "__main__":
    main(Kit(__file__))
