# SPDX-License-Identifier: Apache-2.0
"""Super-resolution training; an exporter runs beside it."""
import multiprocessing as mp
import torch
from rig import Kit, DEV, ConvNet, die_with_parent


def exporter(up, n, rest):
    """a second user of the same device"""
    import time
    die_with_parent()
    a = torch.randn(n, n, device=DEV)
    while True:
        for _ in range(8):
            b = a @ a
        if DEV.type == "cuda":
            torch.cuda.synchronize()
        up.set()
        time.sleep(rest)


def train(net, opt, x):
    opt.zero_grad(set_to_none=True)
    net.body(x).square().mean().backward()
    opt.step()


def main(kit):
    torch.set_num_threads(1)
    side, bs = kit.n(96, 8), kit.n(kit.rng.choice([48, 64]), 2)
    net = ConvNet(kit.n(128, 8), kit.n(6, 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 1e-4)
    x = torch.randn(bs, 3, side, side, device=DEV)
    ctx = mp.get_context("spawn")
    up = ctx.Event()
    p = ctx.Process(target=exporter, args=(up, kit.n(4096, 64), kit.rng.uniform(0, 0.004)), name="DataLoader-0", daemon=True)
    p.start()
    kit.child(p)
    up.wait(90)
    kit.cause("gpu_cotenant", kit.place(train, ".backward()"), "a child process keeps the same GPU busy", p.pid)
    kit.ablate.append(kit.wipe)
    for it in kit.steps():
        train(net, opt, x)
        if it % 10 == 9:
            net.fc.weight.sum().item()


if __name__ == "__main__":
    main(Kit(__file__))
