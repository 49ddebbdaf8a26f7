# SPDX-License-Identifier: Apache-2.0
"""Small-policy training with a statistics thread in the same interpreter."""
import threading, time
import torch
from runkit import Kit, Net, DEV


def quantiles(window):
    out = []
    for q in range(1, 20):
        ordered = sorted(window, key=lambda v: v * 1.0)
        out.append(ordered[len(ordered) * q // 20])
    return out


def watch_gpu(kit, busy, idle):
    window = [(i * 37) % 500 for i in range(500)]
    while True:
        if kit.on:
            t = time.perf_counter()
            while time.perf_counter() - t < busy:
                quantiles(window)
        time.sleep(idle)


def main(kit):
    d = kit.n(256, 16)
    net = Net(d, kit.n(6, 1)).to(DEV)
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    x = torch.randn(kit.n(256, 8), d, device=DEV)
    s = kit.share(0.55)
    busy = 0.04
    kit.cause("gil", kit.place(quantiles, "sorted(window"), "thread prefetch-0 runs pure Python and holds the GIL")
    threading.Thread(target=watch_gpu, args=(kit, busy, busy * (1 - s) / s), name="prefetch-0", daemon=True).start()
    for it in kit.steps():
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
