# SPDX-License-Identifier: Apache-2.0
"""Two ranks with sharded optimiser state (gloo) on one device."""
import io, os, socket, sys, time
import multiprocessing as mp
import numpy as np, torch
import torch.distributed as dist
from PIL import Image
from rig import Kit, Net, DEV, die_with_parent


def augment(blob, times):
    for _ in range(times):
        a = np.asarray(Image.open(io.BytesIO(blob)).rotate(7).convert("L"), np.float32)
    return float(a.mean())


def photo():
    a = np.random.default_rng(5).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    buf = io.BytesIO()
    Image.fromarray(a).save(buf, "JPEG")
    return buf.getvalue()


class Rank:
    def __init__(self, rank, port, d, depth, bs):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=2)
        torch.manual_seed(0)
        self.rank, self.net, self.blob = rank, Net(d, depth, d).to(DEV), photo()
        self.x = torch.randn(bs, d, device=DEV) + rank
        self.ps = list(self.net.parameters())
        n = sum(p.numel() for p in self.ps)
        self.half = [(0, n // 2), (n // 2, n)]
        self.mom = torch.zeros(n - n // 2, device=DEV)

    def step(self, times):
        shift = augment(self.blob, times) / 255 if times else 0.5
        grads = torch.autograd.grad(self.net(self.x + shift).square().mean(), self.ps)
        flat = torch.cat([g.flatten() for g in grads]).cpu()
        dist.all_reduce(flat)
        lo, hi = self.half[self.rank]
        m = self.mom[:hi - lo].mul_(0.9).add_(flat[lo:hi].to(DEV))
        own = m.cpu()
        parts = [torch.empty(b - a) for a, b in self.half]
        for r, p in enumerate(parts):
            if r == self.rank:
                p.copy_(own)
            dist.broadcast(p, r)
        upd, at = torch.cat(parts).to(DEV), 0
        with torch.no_grad():
            for p in self.ps:
                p.sub_(upd[at:at + p.numel()].view_as(p), alpha=1e-5)
                at += p.numel()


def second(port, d, depth, bs):
    die_with_parent()
    me, word = Rank(1, port, d, depth, bs), torch.zeros(1, dtype=torch.long)
    while True:
        dist.broadcast(word, 0)
        me.step(int(word))


def main(kit):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    size = (port, kit.n(kit.rng.choice([384, 512]), 16), kit.n(6, 1), kit.n(2048, 8))
    p = mp.get_context("spawn").Process(target=second, args=size, name="rank-a", daemon=True)
    p.start()
    kit.child(p)
    me = Rank(0, *size)

    def both(times):
        dist.broadcast(torch.tensor([times]), 0)
        me.step(0)

    base, _ = kit.measure(lambda: both(0), 15, 5)
    s, blob = kit.share(0.45), photo()
    times = max(1, round(base * s / (1 - s) / kit.unit(lambda: augment(blob, 1), 50)))
    kit.cause("straggler_rank", kit.place(augment, "Image.open"), "rank 1 alone prepares pictures %d times; rank 0 waits in all_reduce" % times, p.pid)
    for _ in kit.steps():
        both(times if kit.on else 0)


if __name__ == "__main__":
    main(Kit(__file__))
