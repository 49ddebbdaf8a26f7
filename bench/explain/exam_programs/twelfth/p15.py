# SPDX-License-Identifier: Apache-2.0
"""Click prediction: sparse slots from raw records, a deep cross network on top."""
import stage
import threading
import time
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import nn


def records(seed, count):
    for k in range(count):
        n = (k * 2654435761 + seed) % 1_000_003
        yield {"site": f"s{n % 977}", "app": f"a{n % 431}", "geo": n % 61, "hour": n % 24, "tags": (n % 13, n % 7)}


def slots_of(raw, rows):
    found = []
    for rec in raw:
        key = f"{rec['site']}|{rec['app']}|{rec['geo']}"
        found.append(crc32(key.encode()) % rows)
        for tag in rec["tags"]:
            found.append((hash((tag, rec["hour"])) & 0xFFFF) % rows)
    return found


def batches(log, rows, fresh, batch, slots):
    """Most records were seen before and are at hand as numbers; fresh ones are not."""
    known = torch.randint(0, rows, (4 * batch, slots))
    at = 0
    while True:
        ids = known[at % (3 * batch):][:batch].clone()
        want = int(fresh() * 4)
        if want:
            some = [log[(at + k) % len(log)] for k in range(want)]
            flat = torch.tensor(slots_of(some, rows)[: ids.numel()])
            ids.view(-1)[: len(flat)] = flat
        at += 97
        yield ids


class DeepCross(nn.Module):
    def __init__(self, rows, dim, slots, hidden):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        wide = dim * slots
        self.cross = nn.ModuleList(nn.Linear(wide, wide) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(wide, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                  nn.Linear(hidden, 1))

    def forward(self, ids):
        x0 = self.table(ids).flatten(1)
        x = x0
        for lin in self.cross:
            x = x0 * lin(x) + x
        return self.deep(x).squeeze(1)


def refresh(table):
    """Copies a little of the table now and then, as the exporter would."""
    while True:
        time.sleep(0.5)
        table["age"] = table.get("age", 0) + 1


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    rows, dim, slots, hidden, batch = (5000, 8, 8, 64, 64) if tiny else (500_000, 128, 16, 4096, 16384)
    fresh = stage.Dial(10 if tiny else 150)
    feed = batches(list(records(args.seed, 5000)), rows, fresh, batch, slots)
    net = DeepCross(rows, dim, slots, hidden).to(dev)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    threading.Thread(target=refresh, args=({},), name="pageable-copy", daemon=True).start()

    def learn():
        ids = next(feed).to(dev)
        with torch.autocast(dev, torch.bfloat16, enabled=not tiny):
            score = net(ids)
        loss = F.binary_cross_entropy_with_logits(score.float(), (ids[:, 0] & 1).float())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    stage.conduct(args, learn, [fresh])


if __name__ == "__main__":
    main()
