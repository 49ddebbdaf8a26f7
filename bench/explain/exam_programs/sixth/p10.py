# SPDX-License-Identifier: Apache-2.0
"""Scoring server of a language model: requests of bucketed lengths, the stages replayed as captured graphs."""
import collections
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p10")
DIM = job.size([768, 1024], 16)
STAGES = job.size(4, 2)
DEPTH = job.size([3, 4], 1)
BATCH = job.size([16, 24], 2)
LENGTHS = job.size([256, 320], 8)
VOCAB = job.size(8000, 50)
DT = torch.bfloat16 if job.cuda else torch.float32


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH))
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(DEPTH))
        self.proj = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(DEPTH))
        self.up = nn.ModuleList(nn.Linear(DIM, 4 * DIM) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(4 * DIM, DIM) for _ in range(DEPTH))

    def forward(self, x):
        b, t, _ = x.shape
        for i in range(DEPTH):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(b, t, 3, 8, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj[i](a.transpose(1, 2).reshape(b, t, -1))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return x


class StageRunner:
    """Keeps the captured stages in a bounded store; a stage that was dropped is prepared anew."""

    def __init__(self, stages):
        self.stages = stages
        self.inputs = [torch.zeros(BATCH, LENGTHS, DIM, device=job.dev, dtype=DT) for _ in stages]
        self.store = collections.OrderedDict()
        if job.cuda:
            self.pool = torch.cuda.graph_pool_handle()
            self.side = torch.cuda.Stream()
            with torch.cuda.stream(self.side):
                for _ in range(2):
                    for s, x in zip(stages, self.inputs):
                        s(x)
            torch.cuda.synchronize()
        for i in range(len(stages)):
            self.warm_disk_cache(i)

    def warm_disk_cache(self, i):
        self.store.pop(i, None)
        if not job.cuda:
            self.store[i] = (None, self.stages[i](self.inputs[i]))
            return
        g = torch.cuda.CUDAGraph()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            g.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            out = self.stages[i](self.inputs[i])
            g.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)
        self.store[i] = (g, out)

    def run(self, i, x):
        if i not in self.store:
            self.warm_disk_cache(i)
        g, out = self.store[i]
        self.inputs[i].copy_(x)
        if g is None:
            return self.stages[i](self.inputs[i])
        g.replay()
        return out


class Scorer:
    def __init__(self):
        self.emb = nn.Embedding(VOCAB, DIM).to(job.dev, DT)
        self.runner = StageRunner([Stage().to(job.dev, DT).eval() for _ in range(STAGES)])
        self.ids = torch.randint(0, VOCAB, (6, BATCH, LENGTHS), device=job.dev)
        self.drop, self.ticks, self.cursor = 0.0, kit.Ticks(), 0
        self.keep_rows = 0
        self.evidence = None
        self.n = 0

    def lock_and_log(self, hidden):
        rows = hidden.view(-1, DIM)
        whole = self.keep_rows
        parts = []
        while whole > 0:
            take = min(whole, rows.shape[0])
            parts.append(rows[:take].float().cpu())
            whole -= take
        self.evidence = parts

    @torch.no_grad()
    def request(self):
        for _ in range(self.ticks.take(self.drop)):
            self.runner.store.pop(self.cursor % STAGES, None)
            i = self.cursor % STAGES
            self.cursor += 1
            self.runner.warm_disk_cache(i)
        x = self.emb(self.ids[self.n % 6])
        self.n += 1
        for i in range(STAGES):
            x = self.runner.run(i, x)
        self.lock_and_log(x)
        return x.float().mean(2).logsumexp(1).tolist()


def main():
    with torch.no_grad():
        s = Scorer()

    def dropped(n, on):
        s.drop = n if on else 0.0

    def rows(n, on):
        s.keep_rows = int(n) if on else 0
    cs = [kit.Cause("recompilation", "StageRunner.warm_disk_cache", dropped, job.share(0.17, 0.22), 0.8, 0.02, 200),
          kit.Cause("copies", "Scorer.lock_and_log", rows, job.share(0.17, 0.22), job.size(600, 4), 4, 400_000)]
    kit.examine(job, cs, "stages are dropped from the graph store and captured again; the full hidden states go to pageable "
                "host memory although only the scores are used", step=s.request)


if __name__ == "__main__":
    main()
