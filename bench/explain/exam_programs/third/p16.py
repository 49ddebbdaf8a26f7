# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks (gloo) share one device; gradients are averaged through host memory."""
import datetime
import json
import os
import socket
import subprocess
import sys
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rig import Kit, Net, DEV, die_with_parent, sync


class Replica:
    def __init__(self, cfg, rank):
        torch.manual_seed(1)
        self.rank = rank
        self.net = Net(cfg["d"], cfg["depth"], 64).to(DEV)
        self.opt = torch.optim.SGD(self.net.parameters(), 1e-3, foreach=True)
        torch.manual_seed(rank)
        self.x = torch.randn(cfg["rows"], cfg["d"], device=DEV)
        self.y = torch.randint(0, 64, (cfg["rows"],), device=DEV)
        self.docs = ["lorem ipsum dolor sit amet " * 6 for _ in range(40)]
        self.waited = 0.0

    def pack_documents(self, seconds):
        """packs documents of uneven length into rows (this rank owns the long ones)"""
        end = time.perf_counter() + seconds
        rows, room = [], 0
        while time.perf_counter() < end:
            for doc in self.docs:
                need = len(doc.split())
                if need > room:
                    rows, room = [], 512
                rows.append(doc)
                room -= need
        return rows

    def allreduce_slow(self, flat):
        dist.all_reduce(flat)
        return flat.div_(2)

    def step(self, pack=0.0):
        if pack > 0:
            self.pack_documents(pack)
        loss = F.cross_entropy(self.net(self.x), self.y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        head = [self.net.head.weight.grad, self.net.head.bias.grad]
        flat = torch.cat([g.flatten() for g in head]).cpu()
        flat = self.allreduce_slow(flat).to(DEV)
        head[0].copy_(flat[: head[0].numel()].view_as(head[0]))
        self.opt.step()
        sync()


def join(rank, port):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=100))


def follower(cfg):
    die_with_parent()
    torch.set_num_threads(cfg["threads"])
    join(1, cfg["port"])
    r = Replica(cfg, 1)
    order = torch.zeros(2, dtype=torch.float64)
    while True:
        dist.broadcast(order, 0)
        if order[0] < 0:
            break
        r.step(float(order[1]))


def main():
    kit = Kit(__file__)
    rng = kit.rng
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    cfg = {"d": kit.n(rng.choice([1024, 1536]), 32), "depth": kit.n(rng.choice([6, 8]), 1),
           "rows": kit.n(rng.choice([3072, 4096]), 8), "port": port, "threads": 1}
    kit.child(subprocess.Popen([sys.executable, __file__, "--rank1", json.dumps(cfg)]))
    join(0, port)
    r = Replica(cfg, 0)
    order = torch.zeros(2, dtype=torch.float64)
    share = kit.share(0.45)

    def both(pack=0.0):
        order[1] = pack
        dist.broadcast(order, 0)
        r.step()

    base, _ = kit.measure(both, 40)
    extra = base * share / (1 - share)
    for _ in range(2):                          # the ranks overlap on the device: correct by what is measured
        now, _ = kit.measure(lambda: both(extra), 20, 3)
        extra = max(0.1 * base, extra + base / (1 - share) - now)
    kit.cause("straggler_rank", kit.place(Replica.pack_documents, "doc.split()"),
              "rank 1 packs documents before its step, rank 0 waits in the all-reduce", "rank 1")
    for i in kit.steps(warm=10):
        both(extra if kit.on else 0.0)


if __name__ == "__main__":
    if "--rank1" in sys.argv:
        follower(json.loads(sys.argv[sys.argv.index("--rank1") + 1]))
    else:
        main()
