# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
# Token-by-token generation: static KV cache, CUDA-graphed forward, sampling on the host.
import numpy as np
import torch
import torch.nn.functional as F

from bench_kit import mean_step, options, truth, tune, two_phases

opt = options()
DEV = opt.device
DT = torch.bfloat16 if opt.gpu else torch.float32
if opt.smoke:
    L, D, H, B, CTX, V = 2, 64, 4, 4, 64, 500
else:
    L, D, H, CTX, V = 20, 2048, 16, 768, 32000
    B = opt.rng.choice([16, 24, 32])
HIST = 4096


class Decoder:
    def __init__(self):
        def w(*s):
            return (torch.randn(*s, device=DEV) * 0.02).to(DT)
        self.emb = w(V, D)
        self.layers = [dict(qkv=w(3 * D, D), o=w(D, D), up=w(4 * D, D), down=w(D, 4 * D),
                            k=torch.zeros(B, H, CTX, D // H, device=DEV, dtype=DT),
                            v=torch.zeros(B, H, CTX, D // H, device=DEV, dtype=DT)) for _ in range(L)]
        self.tok = torch.zeros(B, dtype=torch.long, device=DEV)
        self.pos = torch.zeros(1, dtype=torch.long, device=DEV)
        self.slots = torch.arange(CTX, device=DEV)
        self.graph = None
        with torch.no_grad():
            for _ in range(2):
                self.out = self.forward()
            if opt.gpu:
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.out = self.forward()

    def forward(self):
        x = self.emb[self.tok]
        mask = (self.slots <= self.pos)[None, None, None, :]
        for ly in self.layers:
            h = F.rms_norm(x, (D,))
            q, k, v = F.linear(h, ly["qkv"]).view(B, 1, 3, H, D // H).permute(2, 0, 3, 1, 4)
            ly["k"].index_copy_(2, self.pos, k)
            ly["v"].index_copy_(2, self.pos, v)
            a = F.scaled_dot_product_attention(q, ly["k"], ly["v"], attn_mask=mask)
            x = x + F.linear(a.transpose(1, 2).reshape(B, D), ly["o"])
            h = F.rms_norm(x, (D,))
            x = x + F.linear(F.silu(F.linear(h, ly["up"])), ly["down"])
        return torch.topk(F.linear(F.rms_norm(x, (D,)), self.emb).float(), 40, dim=-1)

    @torch.no_grad()
    def synchronize_and_decode(self, tokens, pos):
        self.tok.copy_(torch.from_numpy(tokens))
        self.pos.fill_(pos)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.out = self.forward()
        return self.out.values.cpu().numpy(), self.out.indices.cpu().numpy()


class Sampler:
    """Repetition penalty and Gumbel sampling over the top candidates."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.history = [self.rng.integers(0, V, HIST).tolist() for _ in range(B)]
        self.window = 0            # 0: keep a running table instead of reading the history
        self.table = np.zeros((B, V), dtype=np.int16)
        self.rows = np.arange(B)[:, None]

    def penalties(self, cand):
        if self.window == 0:
            return self.table[self.rows, cand].astype(np.float32)
        out = np.zeros(cand.shape, dtype=np.float32)
        for b in range(B):
            seen = {}
            for t in self.history[b][-self.window:]:
                seen[t] = seen.get(t, 0) + 1
            for j, c in enumerate(cand[b].tolist()):
                out[b, j] = seen.get(c, 0)
        return out

    def pick(self, logits, cand):
        score = logits - 0.1 * np.minimum(self.penalties(cand), 8)
        score = score - np.log(-np.log(self.rng.random(score.shape) + 1e-9) + 1e-9)
        choice = cand[np.arange(B), score.argmax(1)]
        self.table[np.arange(B), choice] += 1
        for b in range(B):
            h = self.history[b]
            h.append(int(choice[b]))
            if len(h) > HIST + 512:
                del h[:512]
        return choice


class Generation:
    def __init__(self):
        self.model, self.sampler = Decoder(), Sampler(opt.seed)
        self.tokens, self.n = np.zeros(B, dtype=np.int64), 0

    def one_token(self):
        logits, cand = self.model.synchronize_and_decode(self.tokens, self.n % CTX)
        self.tokens = self.sampler.pick(logits, cand)
        self.n += 1


if __name__ == "__main__":
    g = Generation()
    share = opt.rng.uniform(0.25, 0.40)
    mean_step(g.one_token, opt.probe, DEV)
    base = mean_step(g.one_token, opt.probe, DEV)

    def measure(w):
        g.sampler.window = w
        return mean_step(g.one_token, opt.probe, DEV)

    w = tune(measure, base, share, 200, HIST)
    on, off = two_phases(g.one_token, opt, lambda: setattr(g.sampler, "window", w),
                         lambda: setattr(g.sampler, "window", 0))
    truth(on, off, "host_code", "Sampler.penalties",
          f"pure Python recount of the last {w} tokens for each of {B} sequences, every token")
