# SPDX-License-Identifier: Apache-2.0
"""Pretraining a small causal language model in bf16 with fused AdamW and a calibration probe on its head."""
import kit
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d, bias=False), nn.GELU(), nn.Linear(4 * d, d, bias=False))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self, d, depth, heads, vocab, context):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList([Layer(d, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        h = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


class Probe:
    """Follows how sharp the head is on hidden states it has seen."""

    def __init__(self, model, rows, d):
        self.model = model
        self.kept = torch.randn(rows, d, device=model.tok.weight.device)
        self.sharp = torch.zeros((), device=self.kept.device)

    @torch.no_grad()
    def sharpen(self, rows):
        w = self.model.head.weight
        at, step = 0, self.kept.shape[0]
        while at < rows:
            n = min(step, rows - at)
            logit = self.kept[:n] @ w.T
            self.sharp = logit[0].amax()
            at += n


class Trainer:
    def __init__(self, stage, cfg):
        self.stage, self.cfg = stage, cfg
        self.model = Model(cfg["d"], cfg["depth"], cfg["heads"], cfg["vocab"], cfg["context"]).to(stage.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.probe = Probe(self.model, cfg["rows"], cfg["d"])
        self.text = torch.randint(0, cfg["vocab"], (1 << 20,), device=stage.device)
        self.log, self.count = [], 0

    def batch(self):
        b, t = self.cfg["batch"], self.cfg["context"]
        at = torch.randint(0, len(self.text) - t - 1, (b, 1), device=self.text.device)
        ids = self.text[at + torch.arange(t + 1, device=at.device)]
        return ids[:, :-1], ids[:, 1:]

    def step(self):
        x, y = self.batch()
        with torch.autocast(self.stage.device.type, dtype=torch.bfloat16):
            h = self.model(x)
            loss = F.cross_entropy(self.model.head(h).flatten(0, 1), y.flatten())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.probe.sharpen(int(self.stage.amount("a")))
        self.count += 1
        if self.count % 25 == 0:
            self.log.append(math.exp(min(20.0, loss.item())))


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("device_compute", "Probe.sharpen", kit.LIGHT, start=12000, tiny=64, least=256),
    }, "the probe multiplies with the head in full fp32 outside of autocast")
    if stage.smoke:
        cfg = dict(d=64, depth=1, heads=2, vocab=256, context=32, batch=2, rows=64)
    else:
        cfg = dict(d=stage.pick(896, 1024), depth=stage.pick(6, 8), heads=12, vocab=8192, context=1024,
                   batch=stage.pick(10, 12), rows=4096)
        cfg["heads"] = cfg["d"] // 64
    trainer = Trainer(stage, cfg)
    trainer.step()
    while stage.tick():
        trainer.step()
    stage.leave()
