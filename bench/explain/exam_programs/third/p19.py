# SPDX-License-Identifier: Apache-2.0
"""Online learner over an event stream: small updates, an event journal, a mirrored hot set."""
import os
import sqlite3
import tempfile
import torch
import torch.nn.functional as F
from rig import Kit, Net, DEV


class Journal:
    """one row per decision, for the auditors"""
    def __init__(self, path):
        self.db = sqlite3.connect(path)
        self.db.execute("pragma synchronous=full")
        self.db.execute("create table event (id integer primary key, kind text, score real)")
        self.db.commit()
        self.rate, self.debt = 1.0, 0.0

    def record(self, kind, score):
        self.db.execute("insert into event (kind, score) values (?, ?)", (kind, score))
        self.db.commit()

    def flush(self, score):
        self.debt += self.rate
        while self.debt >= 1:
            self.record("decision", score)
            self.debt -= 1

    def close(self, path):
        self.db.close()
        for end in ("", "-journal", "-wal", "-shm"):
            if os.path.exists(path + end):
                os.remove(path + end)


class HotSet:
    """rows that the serving side reads; a copy goes through the host"""
    def __init__(self):
        self.blocks = []

    def exchange(self):
        for n, b in enumerate(self.blocks):
            host = b.cpu()
            self.blocks[n].copy_(host)


class Learner:
    def __init__(self, d, depth, rows):
        self.net = Net(d, depth, 2).to(DEV)
        self.opt = torch.optim.SGD(self.net.parameters(), 1e-3, momentum=0.9, foreach=True)
        self.x = torch.randn(4, rows, d, device=DEV)
        self.y = torch.randint(0, 2, (4, rows), device=DEV)
        self.score = 0.0

    def update(self, i=0):
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(self.x[i % 4]), self.y[i % 4])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.score = loss.item()


def main():
    kit = Kit(__file__)
    rng = kit.rng
    fd, path = tempfile.mkstemp(suffix=".db")
    os.close(fd)
    learner = Learner(kit.n(rng.choice([1536, 2048]), 32), kit.n(rng.choice([8, 10]), 1),
                      kit.n(rng.choice([4096, 6144]), 8))
    journal = Journal(path)
    kit.at_end.append(lambda: journal.close(path))
    hot = HotSet()
    s_io, s_copy = kit.share(0.21), kit.share(0.21)
    base, _ = kit.measure(learner.update)
    whole = base / (1 - s_io - s_copy)
    journal.rate = max(0.02, whole * s_io / kit.unit(lambda: journal.record("probe", 0.0), 25))
    if kit.smoke:
        journal.rate = min(journal.rate, 5)
    size = kit.n(1 << 20, 1 << 8)
    hot.blocks = [torch.randn(size, device=DEV) for _ in range(4)]
    unit = kit.measure(hot.exchange, 12, 4)[0] / 4
    need = whole * s_copy / unit
    full = max(1, int(need + 0.999)) if not kit.smoke else 2
    hot.blocks = [torch.randn(max(64, int(size * min(1, need / full))), device=DEV) for _ in range(full)]
    kit.cause("io", kit.place(Journal.record, "self.db.commit()"), "a commit per event", "Journal")
    kit.cause("copies", kit.place(HotSet.exchange, "b.cpu()"), "hot rows travel through pageable memory", "HotSet")
    for i in kit.steps(warm=10):
        learner.update(i)
        if kit.on:
            journal.flush(learner.score)
            hot.exchange()


if __name__ == "__main__":
    main()
