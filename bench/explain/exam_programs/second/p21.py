# SPDX-License-Identifier: Apache-2.0
"""Control policy with many small layers; a second thread keeps statistics."""
import threading, time
import torch
from rig import Kit, DEV


def tally(words):
    seen = {}
    for w in words:
        k = w[::-1].lower()
        seen[k] = seen.get(k, 0) + len(k)
    return seen


def uplink(kit, duty, rng):
    words = ["Item%d" % (i % 997) for i in range(5000)]
    while True:
        busy = rng.uniform(0.2, 0.6)
        t = time.perf_counter()
        while kit.on and time.perf_counter() - t < busy:
            tally(words)
        time.sleep(busy * (1 - duty) / duty)


def main(kit):
    d, depth = kit.n(kit.rng.choice([96, 128, 160]), 8), kit.n(60, 4)
    w = [torch.randn(d, d, device=DEV) / d ** 0.5 for _ in range(depth)]
    x0 = torch.randn(kit.n(64, 4), d, device=DEV)
    threading.Thread(target=uplink, args=(kit, kit.rng.uniform(0.3, 0.45), kit.rng), name="nccl-heartbeat", daemon=True).start()
    kit.cause("gil", kit.place(tally, "k = w["), "another thread runs pure Python in bursts and takes the GIL")
    with torch.no_grad():
        for it in kit.steps():
            x = x0
            for m in w:
                x = torch.relu(x @ m).add_(x, alpha=0.1).clamp_(-2, 2)
            if it % 4 == 3:
                x.argmax(-1).tolist()


if __name__ == "__main__":
    main(Kit(__file__))
