# SPDX-License-Identifier: Apache-2.0
"""Contrastive training of a two-tower retriever; the host-side item index is written out regularly."""
import os
import shutil
import tempfile
import threading
import torch
import torch.nn.functional as F
from rig import Kit, Net, DEV


class ItemIndex:
    """item vectors kept in host memory, saved for the serving job"""
    def __init__(self, items, d, folder):
        self.vectors = torch.randn(items, d)
        self.folder, self.saved, self.every = folder, 0, 1
        self.cursor = 0

    def refresh(self, rows):
        n = len(rows)
        lo = self.cursor % max(1, len(self.vectors) - n)
        self.vectors[lo:lo + n] = rows
        self.cursor += n

    def save(self):
        path = os.path.join(self.folder, "index-%d.pt" % (self.saved % 2))
        with open(path, "wb") as f:
            torch.save({"vectors": self.vectors, "cursor": self.cursor}, f)
            f.flush()
            os.fsync(f.fileno())
        self.saved += 1


class Trainer:
    def __init__(self, kit, d, depth, rows):
        self.query = Net(d, depth, 128).to(DEV)
        self.item = Net(d, depth, 128).to(DEV)
        params = list(self.query.parameters()) + list(self.item.parameters())
        self.opt = torch.optim.AdamW(params, 1e-4, foreach=True)
        self.q = torch.randn(rows, d, device=DEV)
        self.i = torch.randn(rows, d, device=DEV)
        self.goal = torch.arange(rows, device=DEV)
        self.acc = 0.0

    def step(self):
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            q, i = self.query(self.q), self.item(self.i)
            s = q @ i.T
        loss = F.cross_entropy(s.float() * 0.1, self.goal)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.acc = 0.9 * self.acc + 0.1 * loss.item()
        return i


def save_checkpoint(history, acc):
    """keeps the last values in memory (the name is historic)"""
    history.append(acc)
    del history[:-100]


def main():
    kit = Kit(__file__)
    rng = kit.rng
    folder = tempfile.mkdtemp()
    kit.at_end.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    trainer = Trainer(kit, kit.n(rng.choice([1024, 1280]), 32), kit.n(rng.choice([8, 10]), 1),
                      kit.n(rng.choice([4096, 6144]), 8))
    index = ItemIndex(kit.n(rng.choice([20000, 30000, 40000]), 100), 128, folder)
    threading.Thread(target=threading.Event().wait, name="disk-flush", daemon=True).start()
    share = kit.share(0.2)
    base, _ = kit.measure(trainer.step, 25)
    cost = kit.unit(index.save, 5)
    limit = 1.0 * share                          # at most one second between two saves
    if cost > limit:
        index.vectors = index.vectors[: max(100, int(len(index.vectors) * limit / cost))].clone()
        cost = kit.unit(index.save, 4)
    index.every = max(1, round(cost * (1 - share) / share / base))
    kit.cause("io", kit.place(ItemIndex.save, "torch.save"),
              "the index is written with fsync in the training loop", "ItemIndex.save")
    history = []
    for i in kit.steps(warm=max(6, min(150, index.every + 1))):
        out = trainer.step()
        if i % 16 == 0:
            index.refresh(out[:32].detach().float().cpu())
        save_checkpoint(history, trainer.acc)
        if kit.on and i % index.every == 0:
            index.save()


if __name__ == "__main__":
    main()
