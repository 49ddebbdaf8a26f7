# SPDX-License-Identifier: Apache-2.0
"""Vision-transformer fine-tuning next to an index builder that keeps the nearest-neighbour search fresh."""
import mmap
import os
import struct
import sys
import tempfile
import time

import stage

if __name__ == "__main__" and "builder" not in sys.argv:
    link = tempfile.NamedTemporaryFile(prefix="index", delete=False)
    link.write(b"\0" * 64)
    link.flush()
    builder = stage.child(__file__, "--role", "builder", "--link", link.name, smoke="--smoke" in sys.argv,
                          stdin=stage.subprocess.DEVNULL)

import torch
import torch.nn.functional as F
from torch import nn


class IndexBuilder:
    """Rebuilds the search index from fresh embeddings, as briskly as it is asked to."""

    def __init__(self, smoke):
        dev = "cpu" if smoke else "cuda"
        self.smoke = smoke
        self.vec = torch.randn(96 if smoke else 6144, 32 if smoke else 6144, device=dev, dtype=torch.bfloat16)
        self.out = self.vec @ self.vec.T

    def rebuild(self):
        for _ in range(1 if self.smoke else 6):
            torch.mm(self.vec, self.vec.T, out=self.out)
        if not self.smoke:
            torch.cuda.synchronize()

    def run(self, path):
        with open(path, "r+b") as f:
            mm = mmap.mmap(f.fileno(), 64)
        struct.pack_into("d", mm, 8, 1.0)
        cost = 0.005
        while True:
            pace = struct.unpack_from("d", mm, 0)[0]
            if pace <= 0:
                time.sleep(0.002)
                continue
            t = time.perf_counter()
            self.rebuild()
            cost = min(cost * 1.05, max(time.perf_counter() - t, 1e-4))
            if pace < 1:
                time.sleep(cost * (1 - pace) / pace)


class ViT(nn.Module):
    def __init__(self, d, depth, heads, patches):
        super().__init__()
        self.inp = nn.Linear(768, d)
        self.pos = nn.Parameter(torch.zeros(patches, d))
        self.body = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, F.gelu, batch_first=True, norm_first=True)
                                  for _ in range(depth))
        self.head = nn.Linear(d, 100)

    def forward(self, x):
        h = self.inp(x) + self.pos
        for f in self.body:
            h = f(h)
        return self.head(h.mean(1))


def main():
    st = stage.Stage()
    st.closers.append(lambda: os.unlink(link.name))
    dev = st.device
    patches, batch = st.pick(196, 8), st.pick(64, 2)
    net = ViT(st.pick(1024, 32), st.pick(6, 1), st.pick(16, 2), patches).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not st.smoke)
    x = torch.randn(batch, patches, 768, device=dev)
    y = torch.randint(0, 100, (batch,), device=dev)
    with open(link.name, "r+b") as f:
        mm = mmap.mmap(f.fileno(), 64)

    def tune_batch():
        with torch.autocast(dev, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    def turn(a):
        struct.pack_into("d", mm, 0, float(a))

    for _ in range(2):
        tune_batch()
    st.sync()
    t = time.monotonic()
    while struct.unpack_from("d", mm, 8)[0] == 0.0 and time.monotonic() - t < (60 if st.smoke else 8):
        time.sleep(0.02)
    stage.background(lambda: [time.sleep(0.1) for _ in iter(int, 1)], "epoch-sleeper")
    knob = stage.Knob("gpu_cotenant", "IndexBuilder.rebuild", turn, 0.5, "middle", alt="main.tune_batch", top=1.0, whole=False)
    st.perform(tune_batch, [knob], settle=4, window=0.4)


if __name__ == "__main__":
    a = stage.arguments()
    if a.role == "builder":
        IndexBuilder(a.smoke).run(a.link)
    else:
        main()
