# SPDX-License-Identifier: Apache-2.0
"""Masked-language training with activations archived by helper processes; the job keeps to its own core."""
import multiprocessing as mp
import os
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Archive:
    """Four processes that compress what the job wants to keep."""

    def __init__(self, seed):
        ctx = mp.get_context("fork")
        self.load = ctx.Value("d", 0.0, lock=False)
        self.kids = [ctx.Process(target=self.squeeze, args=(seed + i,), daemon=True, name=f"sleeper-{i}") for i in range(4)]
        for k in self.kids:
            k.start()
            stage.adopt(k)

    def squeeze(self, seed):
        stage.tether()
        data = bytes((seed * 31 + i * i) % 251 for i in range(40_000))
        while True:
            load = self.load.value
            if load <= 0:
                time.sleep(0.01)
                continue
            t = time.thread_time()
            zlib.compress(data, 6)
            used = time.thread_time() - t
            if load < 1:
                time.sleep(used * (1 - load) / load)


class Encoder(nn.Module):
    def __init__(self, vocab, d, depth, heads):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.body = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, F.gelu, batch_first=True)
                                  for _ in range(depth))
        self.head = nn.Linear(d, 512)

    def forward(self, ids):
        h = self.emb(ids)
        for f in self.body:
            h = f(h)
        return self.head(h)


def main():
    core = sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {core})         # no migrations, steadier timings
    args = stage.arguments()
    archive = Archive(args.seed)
    st = stage.Stage(args, threads=1)
    dev = st.device
    vocab = st.pick(8000, 100)
    net = Encoder(vocab, st.pick(768, 32), st.pick(12, 1), st.pick(12, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not st.smoke)
    ids = torch.randint(0, vocab, (st.pick(14, 2), st.pick(512, 16)), device=dev)
    goal = torch.randint(0, 512, ids.shape, device=dev)
    stage.background(lambda: [time.sleep(0.2) for _ in iter(int, 1)], "gpu-memory-guard")

    def train():
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = net(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), goal.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    def turn(a):
        archive.load.value = float(a)

    knob = stage.Knob("cpu_starvation", "main.train", turn, 0.2, "middle", alt="Archive.squeeze", top=1.0, whole=False)
    st.perform(train, [knob], window=0.45)


if __name__ == "__main__":
    main()
