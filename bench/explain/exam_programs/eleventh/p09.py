# SPDX-License-Identifier: Apache-2.0
"""Two ranks on one device average their gradients through gloo."""
import os
import sys
import threading
import time

import stage


def average_grads(dist, flat):
    dist.all_reduce(flat)
    flat /= 2


class Rank:
    def __init__(self, opts, index, meeting, dial):
        import torch
        import torch.distributed as dist
        self.torch, self.dist = torch, dist
        if opts.smoke:
            torch.set_num_threads(1)
        self.index, self.dial = index, dial
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method="file://" + meeting, rank=index, world_size=2)
        s = opts.smoke
        d = 32 if s else 2048
        nn = torch.nn
        self.net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(d, d), nn.GELU())]).to(opts.device)
        self.half = torch.bfloat16
        self.dev = opts.device
        self.n = 16 if s else 8192
        self.pool = torch.randn(self.n, d, device=opts.device)
        self.words = [(i * 2654435761) % 4093 for i in range(4096)]

    def load(self):
        n = int(self.dial[0]) if self.index else 0
        seen = {}
        for k in range(n):
            w = self.words[k & 4095]
            seen[w] = seen.get(w, 0) + (k % 3)
        return self.pool + (1e-6 * len(seen))

    def step(self):
        torch = self.torch
        x = self.load()
        with torch.autocast(self.dev, dtype=self.half):
            loss = self.net(x).float().square().mean()
        loss.backward()
        head = self.net[0].weight.grad
        flat = head[:64].reshape(-1).cpu()
        average_grads(self.dist, flat)
        head[:64] = flat.view(-1, head.shape[1]).to(self.dev)
        with torch.no_grad():
            for p in self.net.parameters():
                p -= 1e-4 * p.grad
                p.grad = None
        return flat[0].item()


def main():
    opts = stage.options()
    if opts.role == "peer":
        stage.tie_to_parent()
        path, meeting = opts.arg.split("|")
        r = Rank(opts, 1, meeting, stage.Dial(path))
        while True:
            r.step()
    dial = stage.Dial()
    meeting = os.path.join(os.path.dirname(dial.path), "meet")
    stage.child("peer", dial.path + "|" + meeting, opts)
    me = Rank(opts, 0, meeting, dial)
    threading.Thread(target=time.sleep, args=(1e6,), name="nccl-watchdog", daemon=True).start()

    def knob(x):
        dial[0] = x

    stage.conduct(opts, me.step, [
        stage.Factor("straggler_rank", "Rank.load", "average_grads", knob, 8000.0),
    ], "middle", settle=4)


if __name__ == "__main__":
    sys.exit(main())
