# SPDX-License-Identifier: Apache-2.0
"""Long-document model: trims memory after a step and stages results in page-locked memory."""
import torch
from runkit import Kit, Net, DEV

CUDA = DEV.type == "cuda"


def trim():
    if CUDA:
        torch.cuda.empty_cache()


def stage(buf):
    if CUDA:
        rt = torch.cuda.cudart()
        rt.cudaHostRegister(buf.data_ptr(), buf.nbytes, 0)
        rt.cudaHostUnregister(buf.data_ptr())
    else:
        buf.clone()


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(10, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    x = torch.randn(kit.n(kit.rng.choice([4096, 8192]), 8), d, device=DEV)

    def step(clean=False):
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        v = loss.item()
        del loss
        if clean:
            trim()
        return v

    base, _ = kit.measure(step)
    s = kit.share(0.18)
    want = base * s / (1 - s)
    extra = max(1e-6, kit.measure(lambda: step(True), 10)[0] - base)
    every = max(1, round(extra / (want / 2)))
    left = max(want / 4, want - extra / every)
    buf = torch.zeros(kit.n(64, 1) << 18)
    per = kit.unit(lambda: stage(buf), 5) / len(buf)
    rows = int(min(1 << 28, max(1024, left / per)))
    buf = torch.zeros(rows)
    kit.cause("allocator", kit.place(trim, "empty_cache"), "empty_cache every %d steps: cudaFree and cudaMalloc again" % every)
    kit.cause("allocator", kit.place(stage, "rt.cudaHostRegister("), "page-locks %d MB anew each step" % (buf.nbytes >> 20))
    n = 0
    for it in kit.steps():
        n += 1
        step(kit.on and n % every == 0)
        if kit.on:
            stage(buf)


if __name__ == "__main__":
    main(Kit(__file__))
