# SPDX-License-Identifier: Apache-2.0
"""Volume denoising: a projection and a chain of element-wise filters."""
import torch
from runkit import Kit, DEV


def soften(v, tmp, passes):
    for k in range(passes):
        torch.mul(v, 0.9, out=tmp)
        torch.add(tmp, 0.01, out=v)
    return v


def main(kit):
    n = kit.n(kit.rng.choice([128, 192, 256]), 1) * 1024 * (1024 if not kit.smoke else 1)
    v, tmp = torch.rand(n, device=DEV), torch.empty(n, device=DEV)
    d = kit.n(4096, 32)
    w = torch.randn(d, d, device=DEV) / d ** 0.5
    if DEV.type == "cuda":
        w = w.bfloat16()
    y = w.clone()

    def project():
        for _ in range(30):
            torch.mm(w, w, out=y)

    base, _ = kit.measure(project)
    s = kit.share(0.62, 0.85, 1.15)
    passes = max(1, round(base * s / (1 - s) / (kit.measure(lambda: soften(v, tmp, 4))[0] / 4)))
    kit.cause("device_memory_bandwidth", kit.place(soften, "torch.mul("), "unfused element-wise passes over %d MB" % (n * 4 >> 20))
    for it in kit.steps():
        project()
        if kit.on:
            soften(v, tmp, passes)
        if it % 10 == 9:
            y[0, 0].item()


if __name__ == "__main__":
    main(Kit(__file__))
