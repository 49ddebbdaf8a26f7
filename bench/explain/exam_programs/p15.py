# SPDX-License-Identifier: Apache-2.0
"""Transformer-size matrix products, one loader thread that only counts."""
import threading, time
import torch
from runkit import Kit, Net, DEV


def loader(state):
    while True:
        time.sleep(0.05)
        state["seen"] += 1


def main(kit):
    d = kit.n(4096, 32)
    full = Net(d, kit.n(2, 1)).to(DEV)
    half = Net(d, kit.n(2, 1)).to(DEV).bfloat16()
    x = torch.randn(kit.n(kit.rng.choice([2048, 3072, 4096]), 8), d, device=DEV)
    xh = x.bfloat16()
    threading.Thread(target=loader, args=({"seen": 0},), name="loader", daemon=True).start()
    torch.backends.cuda.matmul.allow_tf32 = False

    def train(net, x):
        loss = net(x).float().square().mean()
        net.zero_grad(set_to_none=True)
        loss.backward()
        return loss

    kit.cause("device_compute", kit.place(train, "net(x)"), "large fp32 matrix products (no TF32, no bf16)")
    for it in kit.steps():
        loss = train(full, x) if kit.on else train(half, xh)
        if it % 5 == 4:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
