# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of a document classifier: two ranks share one card, gradients averaged over gloo."""
import os
import sys
import tempfile
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import exam_kit as kit

RANK = int(sys.argv[sys.argv.index("--rank") + 1]) if "--rank" in sys.argv else 0
if RANK:
    kit.die_with_parent()
import datetime
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

job = kit.Job("p06", threads=2)
BATCH = job.size([256, 384, 512], 4)
WORDS = job.size([64, 96], 6)
DIM = job.size([256, 320], 8)
VOCAB = 5000


class DocNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.convs = nn.ModuleList(nn.Conv1d(DIM, DIM, 5, padding=2) for _ in range(3))
        self.head = nn.Linear(DIM, 20)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for c in self.convs:
            x = x + F.gelu(c(x))
        return self.head(x.amax(2))


class Shard:
    """The rank's part of the corpus; sharded by publisher."""

    def __init__(self):
        base = ["market", "quarter", "profits", "rose", "after", "talks", "court", "ruling", "season", "goal"]
        self.docs = [" ".join(base[(i * j + j) % 10] for j in range(1, 40)) for i in range(50)]
        self.share_of_docs = 0.0
        self.pos = 0
        self.ids = torch.randint(0, VOCAB, (8, BATCH, WORDS), device=job.dev)
        self.y = torch.randint(0, 20, (8, BATCH), device=job.dev)
        self.ticks = kit.Ticks()
        self.count = {}

    def device_prefetch(self, docs):
        for _ in range(docs):
            for w in self.docs[self.pos % 50].split():
                h = 0
                for ch in w:
                    h = (h * 31 + ord(ch)) & 0xFFFFF
                self.count[h % VOCAB] = self.count.get(h % VOCAB, 0) + 1
            self.pos += 1

    def batch(self, i):
        self.device_prefetch(self.ticks.take(self.share_of_docs))
        return self.ids[i % 8], self.y[i % 8]


class Replica:
    def __init__(self, init):
        self.net = DocNet().to(job.dev)
        self.params = list(self.net.parameters())
        self.shard = Shard()
        self.opt = torch.optim.SGD(self.params, lr=0.01, foreach=True)
        self.order = torch.zeros(2)
        self.plan = [1.0, 0.0]
        self.i = 0
        dist.init_process_group("gloo", init_method=init, rank=RANK, world_size=2,
                                timeout=datetime.timedelta(seconds=120))

    def average(self):
        flat = torch.cat([p.grad.view(-1) for p in self.params[1:]] + [self.params[0].grad.sum(0)]).cpu()
        dist.all_reduce(flat)
        flat = (flat / 2).to(job.dev)
        at = 0
        for p in self.params[1:]:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()

    def step(self):
        x, y = self.shard.batch(self.i)
        self.i += 1
        loss = F.cross_entropy(self.net(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.average()
        self.opt.step()
        self.order[0], self.order[1] = self.plan if RANK == 0 else (0.0, 0.0)
        dist.all_reduce(self.order)
        if RANK:
            self.shard.share_of_docs = float(self.order[1])
        return float(self.order[0])


def main():
    if RANK:
        r = Replica(sys.argv[sys.argv.index("--init") + 1])
        while r.step() > 0.5:
            pass
        os._exit(0)
    init = "file://" + os.path.join(tempfile.mkdtemp(prefix="ddp"), "store")
    kit.child(["--rank", 1, "--init", init, "--seed", job.seed] + (["--smoke"] if job.smoke else []))
    r = Replica(init)

    def docs(n, on):
        r.plan[1] = n if on else 0.0

    def goodbye():
        if not kit.finished:
            return
        r.plan[0] = 0.0
        r.step()
    kit.on_close(goodbye)
    c = kit.Cause("straggler_rank", "Shard.device_prefetch", docs, job.share(0.14, 0.19), job.size(10, 1), 0.5, 5000)
    kit.examine(job, [c], "rank 1 tokenises extra documents in Python; rank 0 waits for it in Replica.average (all_reduce)",
                step=r.step, window=0.7)


if __name__ == "__main__":
    main()
