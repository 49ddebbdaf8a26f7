# SPDX-License-Identifier: Apache-2.0
"""Language-model pre-training in bf16 on one device; a background packer compresses old shards."""
import math
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, vocab, d, depth, heads):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h))


def slow_io_writer(blob):
    """Compresses finished shards all the time, at its leisure."""
    while True:
        for i in range(0, len(blob), 1 << 20):
            zlib.compress(blob[i:i + (1 << 20)], 6)
        time.sleep(0.02)


def stall_detector(state):
    while True:
        time.sleep(0.1)
        state["beat"] = state.get("beat", 0) + 1


def main():
    st = stage.Stage()
    dev = st.device
    vocab, batch, length = st.pick(16384, 128), st.pick(8, 2), st.pick(1024, 16)
    net = LM(vocab, st.pick(1536, 32), st.pick(8, 2), st.pick(12, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4, fused=not st.smoke)
    pool = torch.randint(0, vocab, (64, batch, length + 1))
    if not st.smoke:
        pool = pool.pin_memory()
    state = {"step": 0, "loss": math.nan}
    blob = bytes(range(256)) * (1 << 14)
    stage.background(slow_io_writer, "io-blocked", blob)
    stage.background(stall_detector, "straggler-lock", state)

    def update():
        ids = pool[state["step"] % 64].to(dev, non_blocking=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        state["step"] += 1
        if state["step"] % 20 == 0:
            state["loss"] = loss.item()

    st.perform(update)


if __name__ == "__main__":
    main()
