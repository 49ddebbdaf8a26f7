# SPDX-License-Identifier: Apache-2.0
"""Self-play: positions are scored while other programs prepare games."""
import multiprocessing as mp
import os
import torch
from rig import Kit, DEV, die_with_parent


def games(up, seed):
    die_with_parent()
    n = seed + 1
    up.release()
    while True:
        n = (n * 6364136223846793005 + 1442695040888963407) % (1 << 64)


@torch.no_grad()
def score(ws, x):
    for w in ws:
        x = torch.nn.functional.gelu(x @ w).add_(x).mul_(0.7)
    return x.sum(1).topk(4).indices.tolist()


def main(kit):
    torch.set_num_threads(1)
    d = kit.n(kit.rng.choice([128, 192]), 8)
    ws = [torch.randn(d, d, device=DEV) / d ** 0.5 for _ in range(kit.n(50, 3))]
    x = torch.randn(kit.n(128, 4), d, device=DEV)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-2:])
    n, ctx = kit.n(kit.rng.choice([5, 6, 7]), 2), mp.get_context("spawn")
    up = ctx.Semaphore(0)
    ps = [ctx.Process(target=games, args=(up, i), name="reader-%d" % i, daemon=True) for i in range(n)]
    for p in ps:
        p.start()
        kit.child(p)
    for p in ps:
        up.acquire(timeout=30)
    kit.cause("cpu_starvation", kit.place(score, "gelu(x @ w)"), "%d children are busy on the same two cores: %s" % (n, [p.pid for p in ps]), ps[0].pid)
    kit.ablate.append(kit.wipe)
    for _ in kit.steps():
        score(ws, x)


if __name__ == "__main__":
    main(Kit(__file__))
