# SPDX-License-Identifier: Apache-2.0
"""Click model with a trail of events kept on disk."""
import os, shutil, tempfile, time
import torch
import torch.nn.functional as F
from rig import Kit, Net, DEV


class Trail:
    def __init__(self, where):
        self.where, self.debt = where, 0.0
        self.f = open(os.path.join(where, "events"), "wb")
        self.row = os.urandom(1 << 16)

    def note(self):
        if self.f.tell() > 1 << 28:
            self.f.seek(0)
        self.f.write(self.row)
        self.f.flush()
        os.fsync(self.f.fileno())

    def settle(self, due):
        """rows that have become due since the last call"""
        self.debt += due
        while self.debt > 0:
            t = time.perf_counter()
            self.note()
            self.debt -= time.perf_counter() - t


def main(kit):
    where = tempfile.mkdtemp()
    kit.at_end.append(lambda: shutil.rmtree(where, True))
    d, bs = kit.n(64, 8), kit.n(8192, 32)
    emb = torch.randn(kit.n(1_000_000, 100), d, device=DEV)
    net = Net(8 * d, kit.n(kit.rng.choice([5, 8]), 1), 1).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 1e-3)
    ids = torch.randint(0, len(emb), (bs, 8), device=DEV)

    def fit():
        loss = F.softplus(net(emb[ids].flatten(1))).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    base, _ = kit.measure(fit)
    s, trail, at = kit.share(0.21), Trail(where), 5
    kit.cause("io", kit.place(Trail.note, "os.fsync"), "event rows are forced to disk in bursts at random steps")
    waiting = 0.0
    for it in kit.steps():
        fit()
        if kit.on:
            waiting += base * s / (1 - s)
            at -= 1
            if at <= 0:
                trail.settle(waiting)
                waiting, at = 0.0, kit.rng.randint(1, 24)


if __name__ == "__main__":
    main(Kit(__file__))
