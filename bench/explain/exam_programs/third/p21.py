# SPDX-License-Identifier: Apache-2.0
"""Pre-training of a wide encoder in bf16, with the usual services beside it."""
import queue
import threading
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Feed(threading.Thread):
    """puts the next batches on the device ahead of time"""
    def __init__(self, batch, length, vocab, seed):
        super().__init__(name="slow-disk-reader", daemon=True)
        self.q = queue.Queue(4)
        self.g = torch.Generator().manual_seed(seed)
        self.shape, self.vocab = (batch, length), vocab

    def run(self):
        pool = [torch.randint(0, self.vocab, self.shape, generator=self.g) for _ in range(6)]
        if DEV.type == "cuda":
            pool = [p.pin_memory() for p in pool]
        i = 0
        while True:
            self.q.put(pool[i % 6])
            i += 1

    def __iter__(self):
        return self

    def __next__(self):
        return self.q.get().to(DEV, non_blocking=True)


class Masked(nn.Module):
    def __init__(self, vocab, d, heads, depth):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)))


def lock_contention(stop, beat):
    while not stop.wait(0.25):
        beat.append(time.time())
        del beat[:-10]


class Meter:
    def __init__(self):
        self.mean = torch.zeros((), device=DEV)
        self.count = 0

    def add(self, loss):
        self.mean.lerp_(loss.detach().float(), 0.02)
        self.count += 1

    def read(self):
        return self.mean.item()


def train_step(net, opt, ids, meter):
    keep = ids % 7 != 0
    with torch.autocast(DEV.type, dtype=torch.bfloat16):
        out = net(ids * keep)
        loss = F.cross_entropy(out.flatten(0, 1), ids.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    meter.add(loss)


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([896, 1024]), 32)
    length = kit.n(rng.choice([256, 384]), 16)
    batch = kit.n(rng.choice([12, 16, 20]), 2)
    vocab = kit.n(8192, 64)
    with DEV:
        net = Masked(vocab, d, kit.n(d // 128, 2), kit.n(rng.choice([8, 10]), 1))
    opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=DEV.type == "cuda")
    feed = Feed(batch, length, vocab, kit.args.seed)
    feed.start()
    stop, beat, meter = threading.Event(), [], Meter()
    threading.Thread(target=lock_contention, args=(stop, beat), name="lock-contention", daemon=True).start()
    kit.cause("healthy", kit.place(train_step, "loss.backward()"), "nothing is lost; the device is busy")
    for i in kit.steps(warm=10):
        train_step(net, opt, next(feed), meter)
        if i % 100 == 99:
            meter.read()


if __name__ == "__main__":
    main()
