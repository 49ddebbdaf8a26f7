# SPDX-License-Identifier: Apache-2.0
"""Regressor training; a validation pass happens now and then."""
import torch
from runkit import Kit, Net, DEV


@torch.no_grad()
def validate(net, rows):
    net.eval()
    worst = 0.0
    for r in rows:
        worst = max(worst, net(r[None]).abs().mean().item())
    net.train()
    return worst


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(8, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    x = torch.randn(kit.n(4096, 8), d, device=DEV)
    val = torch.randn(kit.n(kit.rng.choice([150, 300]), 4), d, device=DEV)

    def step():
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss

    base, _ = kit.measure(step)
    s = kit.share(0.16)
    chance = base * s / (1 - s) / kit.unit(lambda: validate(net, val), 3)
    if chance > 0.5:
        val = val[:max(2, int(len(val) * 0.5 / chance))]
        chance = 0.5
    kit.cause("synchronization", kit.place(validate, ".item()"), "validation bursts, one row and one .item() at a time, chance %.3f a step" % chance)
    kit.cause("launch_overhead", kit.place(validate, "net(r[None])"), "the same bursts: batch of one, small kernels")
    for it in kit.steps():
        loss = step()
        if it % 20 == 19:
            loss.item()
        if kit.rng.random() < chance and kit.on:
            validate(net, val)


if __name__ == "__main__":
    main(Kit(__file__))
