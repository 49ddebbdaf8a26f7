# SPDX-License-Identifier: Apache-2.0
"""Contrastive image-text training with several slow-moving copies of the weights for later averaging."""
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


def trunk(inp, d, depth):
    layers = [nn.Linear(inp, d), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(d, d), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(d, 512))


class Shadow:
    """Averages with different memories, held in float32, updated in place."""

    def __init__(self, size, decays, dev):
        self.live = torch.randn(size, device=dev)
        self.slow = {d: torch.zeros(size, device=dev) for d in decays}
        self.tmp = torch.empty(size, device=dev)
        self.part = 0

    def follow(self):
        n = self.part
        if not n:
            return
        live, tmp = self.live[:n], self.tmp[:n]
        for d, s in self.slow.items():
            torch.sub(live, s[:n], out=tmp)
            tmp.mul_(1 - d)
            s[:n].add_(tmp)


def make_step(image, text, opt, pics, words, shadow, dev):
    scale = torch.tensor(14.0, device=dev)
    labels = torch.arange(len(pics), device=dev)

    def step():
        with torch.autocast(dev, dtype=torch.bfloat16):
            a = F.normalize(image(pics), dim=-1)
            b = F.normalize(text(words), dim=-1)
            logits = (a @ b.T).float() * scale
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        shadow.follow()
        return loss
    return step


def copy_to_host_watch():
    while True:
        time.sleep(0.3)


def main():
    st = stage.Stage()
    dev = st.device
    n, d = st.pick(8192, 64), st.pick(2048, 32)
    image, text = trunk(st.pick(1024, 32), d, st.pick(6, 1)).to(dev), trunk(st.pick(768, 32), d, st.pick(6, 1)).to(dev)
    opt = torch.optim.AdamW([*image.parameters(), *text.parameters()], lr=1e-4, fused=not st.smoke)
    pics = torch.randn(n, st.pick(1024, 32), device=dev)
    words = torch.randn(n, st.pick(768, 32), device=dev)
    shadow = Shadow(st.pick(1_000_000_000, 4_000_000), (0.99, 0.999, 0.9999), dev)
    stage.background(copy_to_host_watch, "d2h-copier")
    step = make_step(image, text, opt, pics, words, shadow, dev)

    def turn(a):
        shadow.part = int(a)

    knob = stage.Knob("device_memory_bandwidth", "Shadow.follow", turn, st.pick(300_000_000, 300_000), "heavy",
                      alt="make_step.step", top=st.pick(1_000_000_000, 4_000_000))
    st.perform(step, [knob])


if __name__ == "__main__":
    main()
