# SPDX-License-Identifier: Apache-2.0
"""Shallow-water simulation with a learned closure; fields are re-laid for the analysis by a Triton kernel."""
import os
import shutil
import tempfile
import threading
import torch
import torch.nn as nn
from rig import Kit, DEV

CACHE = tempfile.mkdtemp()
os.environ["TRITON_CACHE_DIR"] = CACHE
try:
    import triton
    import triton.language as tl
except Exception:
    triton = None

if triton is not None:
    @triton.jit
    def relay_kernel(src, dst, rows, cols, BLOCK: tl.constexpr):
        c = tl.program_id(0)
        r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = r < rows
        v = tl.load(src + r * cols + c, mask=ok)          # one value per memory line
        tl.store(dst + r * cols + c, v * 0.999, mask=ok)


class Relayout:
    def __init__(self, side, fields):
        self.src = [torch.rand(side, side, device=DEV) for _ in range(fields)]
        self.dst = [torch.empty(side, side, device=DEV) for _ in range(fields)]
        self.count = 1
        self.triton = triton is not None and DEV.type == "cuda"
        if self.triton:
            try:
                self.one(0)
                torch.cuda.synchronize()
            except Exception:
                self.triton = False              # no compiler for the launcher

    def one(self, n):
        a, b = self.src[n % len(self.src)], self.dst[n % len(self.dst)]
        if self.triton:
            rows, cols = a.shape
            relay_kernel[(cols, triton.cdiv(rows, 256))](a, b, rows, cols, BLOCK=256)
        else:
            b.t().copy_(a)

    def export(self):
        for n in range(self.count):
            self.one(n)


class Water:
    def __init__(self, side, width, depth):
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.GELU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GELU()]
        self.closure = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1)).to(DEV)
        if DEV.type == "cuda":
            self.closure = self.closure.to(torch.bfloat16)
        self.u = torch.randn(1, 3, side, side, device=DEV)
        self.energy = torch.zeros((), device=DEV)

    def laplace(self, f):
        return f.roll(1, 2) + f.roll(-1, 2) + f.roll(1, 3) + f.roll(-1, 3) - 4 * f

    def advance(self):
        dt = next(self.closure.parameters()).dtype
        drive = self.closure(self.u.to(dt)).float()
        self.u = torch.tanh(self.u + 0.05 * self.laplace(self.u) + 0.01 * drive)
        self.energy.lerp_(self.u.square().mean(), 0.05)


@torch.no_grad()
def main():
    kit = Kit(__file__)
    kit.at_end.append(lambda: shutil.rmtree(CACHE, ignore_errors=True))
    rng = kit.rng
    side = kit.n(rng.choice([768, 1024]), 24)
    water = Water(side, kit.n(rng.choice([64, 96]), 4), kit.n(rng.choice([6, 8]), 1))
    torch.backends.cudnn.benchmark = True
    share = kit.share(0.22)
    threading.Thread(target=threading.Event().wait, name="h2d-copier", daemon=True).start()

    base, _ = kit.measure(water.advance, 40)
    lay = Relayout(kit.n(rng.choice([3072, 4096]), 32), 4)
    # single fields are long against a launch, so that a whole number of them may miss the share: scale the side
    cost = kit.measure(lambda: lay.one(1), 20, 5)[0]
    need = base * share / (1 - share)
    if cost > need / 3 and not kit.smoke:
        lay = Relayout(max(512, int(lay.src[0].shape[0] * (need / 3 / cost) ** 0.5)), 4)
        cost = kit.measure(lambda: lay.one(1), 20, 5)[0]
    lay.count = max(1, round(need / cost))
    kit.cause("device_memory_bandwidth", kit.place(Relayout.one, "relay_kernel["),
              "fields are walked through column by column in every step", "relay_kernel")
    for i in kit.steps(warm=15):
        water.advance()
        if kit.on:
            lay.export()


if __name__ == "__main__":
    main()
