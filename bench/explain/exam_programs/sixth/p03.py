# SPDX-License-Identifier: Apache-2.0
"""Pretraining of a small vision transformer on synthetic patches, bf16."""
import gc
import threading
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p03")
BATCH = job.size([64, 80, 96], 2)
TOKENS = job.size(256, 8)
DIM = job.size([1024, 1280], 32)
DEPTH = job.size([6, 8], 2)
HEADS = job.size(16, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class HeapSweeper:
    """Housekeeping that used to be expensive; now it looks in every two seconds."""

    def __init__(self):
        gc.collect()
        gc.freeze()
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.seen = 0
        self.thread = threading.Thread(target=self.busy_spin, name="gil-hog", daemon=True)
        self.thread.start()

    def busy_spin(self):
        while not self.stop.wait(2.0):
            with self.lock:
                self.seen += 1

    def close(self):
        self.stop.set()
        self.thread.join(3)
        gc.unfreeze()


class SlowSyncTrainer:
    def __init__(self):
        self.embed = nn.Linear(768 if not job.smoke else 16, DIM).to(job.dev)
        self.net = nn.Sequential(*[Block() for _ in range(DEPTH)], nn.LayerNorm(DIM)).to(job.dev)
        self.head = nn.Linear(DIM, 1000).to(job.dev)
        params = [*self.embed.parameters(), *self.net.parameters(), *self.head.parameters()]
        self.opt = torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=True)
        self.images = torch.randn(4, BATCH, TOKENS, self.embed.in_features, device=job.dev)
        self.labels = torch.randint(0, 1000, (4, BATCH), device=job.dev)
        self.sweeper = HeapSweeper()
        self.log = []
        self.n = 0

    def wait_for_stragglers(self):
        return 1

    def load_from_disk(self):
        i = self.n % 4
        return self.images[i], self.labels[i]

    def step(self):
        x, y = self.load_from_disk()
        with torch.autocast(job.dev.type, dtype=torch.bfloat16):
            h = self.net(self.embed(x)).mean(1)
            loss = F.cross_entropy(self.head(h).float(), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.n += self.wait_for_stragglers()
        with self.sweeper.lock:
            if self.n % 100 == 0:
                self.log.append(loss.item())


def main():
    t = SlowSyncTrainer()
    kit.on_close(t.sweeper.close)
    kit.examine(job, [], "healthy: limited by the matrix products of the network; the sweeper, its lock and the sync "
                "every 100 steps are harmless", step=t.step)


if __name__ == "__main__":
    main()
