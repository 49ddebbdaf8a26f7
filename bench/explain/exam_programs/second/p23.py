# SPDX-License-Identifier: Apache-2.0
"""Weather-like field simulation; a neighbour comes and goes."""
import multiprocessing as mp
import random, time
import torch
from rig import Kit, DEV, die_with_parent


def visitor(up, n, duty, seed):
    die_with_parent()
    rng = random.Random(seed)
    a = torch.randn(n, n, device=DEV)
    while True:
        busy = rng.uniform(0.3, 1.2)
        t = time.perf_counter()
        while time.perf_counter() - t < busy:
            for _ in range(6):
                b = torch.tanh(a @ a)
            b[0, 0].item()
        up.set()
        time.sleep(busy * (1 - duty) / duty)


def advance(u, v, taps):
    for k in taps:
        lap = torch.nn.functional.conv2d(u, k, padding=2)
        u, v = u + 0.05 * v, v * 0.99 + 0.05 * lap
    return u.clamp(-3, 3), v.clamp(-3, 3)


@torch.no_grad()
def main(kit):
    torch.set_num_threads(1)
    side, c = kit.n(kit.rng.choice([512, 640]), 16), kit.n(48, 2)
    u, v = torch.randn(4, c, side, side, device=DEV), torch.zeros(4, c, side, side, device=DEV)
    taps = [torch.randn(c, c, 5, 5, device=DEV) * 0.01 for _ in range(kit.n(4, 1))]
    ctx = mp.get_context("spawn")
    up = ctx.Event()
    p = ctx.Process(target=visitor, args=(up, kit.n(4096, 64), kit.rng.uniform(0.25, 0.45), kit.args.seed), name="resource_tracker", daemon=True)
    p.start()
    kit.child(p)
    up.wait(90)
    kit.cause("gpu_cotenant", kit.place(advance, "conv2d"), "a child process uses the same GPU in bursts", p.pid)
    kit.ablate.append(kit.wipe)
    for it in kit.steps():
        u, v = advance(u, v, taps)
        if it % 20 == 19:
            u.mean().item()


if __name__ == "__main__":
    main(Kit(__file__))
