# SPDX-License-Identifier: Apache-2.0
"""Speech encoder training (fp16, GradScaler); filter-bank augmentation in numpy on the host."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV

CUDA = DEV.type == "cuda"


class Encoder(nn.Module):
    def __init__(self, bins, d, heads, depth, tokens):
        super().__init__()
        self.inp = nn.Conv1d(bins, d, 3, 2, 1)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(d, tokens)

    def forward(self, x):
        return self.out(self.body(self.inp(x).transpose(1, 2)))


class Augmenter:
    """time and frequency masks plus noise, in place"""
    def __init__(self, batch, bins, frames, seed):
        self.r = np.random.default_rng(seed)
        self.clean = self.r.standard_normal((batch, bins, frames), dtype=np.float32)
        self.buf = np.empty_like(self.clean)
        self.passes = 1

    def smear(self, gain):
        np.multiply(self.buf, gain, out=self.buf)
        np.tanh(self.buf[: max(1, len(self.buf) // 8)], out=self.buf[: max(1, len(self.buf) // 8)])

    def __call__(self):
        np.copyto(self.buf, self.clean)
        for i in range(self.passes):
            self.smear(0.99 + 0.001 * (i % 5))
        f = int(self.r.integers(self.buf.shape[1] - 2))
        self.buf[:, f:f + 2] = 0
        x = torch.from_numpy(self.buf)
        return x.pin_memory() if CUDA else x.clone()


class Progress:
    def __init__(self):
        self.total = torch.zeros((), device=DEV)
        self.last, self.lines = 0.0, 0

    def fast(self, loss):
        self.total.mul_(0.98).add_(loss.detach(), alpha=0.02)

    def log(self, loss):
        self.last = 0.98 * self.last + 0.02 * loss.item()
        self.lines += 1


def wait_for_device(sizes):
    """rounds the sizes of the next batch up (the name is from an older version)"""
    return [(s + 7) // 8 * 8 for s in sizes]


def main():
    kit = Kit(__file__)
    rng = kit.rng
    batch = kit.n(rng.choice([48, 52, 56]), 2)
    frames = kit.n(rng.choice([800, 880]), 16)
    bins = 80
    d = kit.n(768, 32)
    net = Encoder(bins, d, kit.n(12, 2), kit.n(rng.choice([7, 8]), 1), 128).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=True) if CUDA else torch.optim.AdamW(net.parameters(), 1e-4)
    scaler = torch.amp.GradScaler(DEV.type, enabled=CUDA)
    aug = Augmenter(batch, bins, frames, kit.args.seed)
    target = torch.randint(0, 128, (batch, frames // 2), device=DEV)
    share = kit.share(0.36, 0.85, 1.12)
    ready = aug()

    def update(x):
        x = x.to(DEV, non_blocking=True)
        with torch.autocast(DEV.type, dtype=torch.float16 if CUDA else torch.bfloat16):
            out = net(x)
            loss = F.cross_entropy(out.flatten(0, 1).float(), target.flatten())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    base, host = kit.measure(lambda: update(ready), 20)
    aug.passes = 0
    fixed = kit.unit(aug)
    unit = kit.unit(lambda: aug.smear(0.99), 30)
    aug.passes = max(1, round((base * share / (1 - share) - fixed) / unit))
    progress = Progress()
    kit.cause("synchronization", kit.place(Progress.log, "loss.item()"),
              "the host waits for the loss before it prepares the next batch", "loss.item()")
    for i in kit.steps(warm=8):
        wait_for_device([frames, bins])
        loss = update(aug())
        if kit.on:
            progress.log(loss)
        else:
            progress.fast(loss)


if __name__ == "__main__":
    main()
