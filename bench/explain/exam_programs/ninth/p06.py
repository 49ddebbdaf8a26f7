# SPDX-License-Identifier: Apache-2.0
"""Protein contact maps: two replicas on one card average their gradients through gloo."""
import kit
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
RANK = int(sys.argv[sys.argv.index("--rank") + 1]) if "--rank" in sys.argv else 0
if RANK == 0:
    MEET, DIAL = tempfile.mkdtemp(prefix="pair"), kit.Dial()
    PEER = subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:],
                             "--rank", "1", "--meet", MEET, "--dial", DIAL.path], stdout=subprocess.DEVNULL)
else:
    kit.bond()
    MEET = sys.argv[sys.argv.index("--meet") + 1]
    DIAL = kit.Dial(sys.argv[sys.argv.index("--dial") + 1])

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def trunk(c, depth):
    layers = [nn.Conv2d(8, c, 3, padding=1)]
    for i in range(depth):
        layers += [nn.Conv2d(c, c, 3, padding=1 + i % 2, dilation=1 + i % 2), nn.InstanceNorm2d(c), nn.ELU()]
    return nn.Sequential(*layers, nn.Conv2d(c, 1, 1))


class Replica:
    def __init__(self, stage, c, depth, length):
        self.stage, self.length = stage, length
        torch.manual_seed(11)
        self.net = trunk(c, depth).to(stage.device)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        total = sum(p.numel() for p in self.net.parameters())
        self.flat = torch.zeros(total, pin_memory=stage.cuda)
        self.rng = np.random.default_rng(RANK)
        self.msa = self.rng.integers(0, 21, (64, length))

    def featurise(self, columns):
        """Pair statistics of the alignment, a column at a time."""
        pair = np.zeros((21, 21))
        for k in range(columns):
            i, j = k % self.length, (7 * k + 3) % self.length
            np.add.at(pair, (self.msa[:, i], self.msa[:, j]), 1.0)
        return pair

    def mix(self):
        grads = [p.grad for p in self.net.parameters()]
        self.flat.copy_(torch.cat([g.reshape(-1) for g in grads]))
        dist.all_reduce(self.flat)
        new = self.flat.to(self.stage.device).mul_(0.5)
        at = 0
        for g in grads:
            g.copy_(new[at:at + g.numel()].view_as(g))
            at += g.numel()

    def step(self):
        if RANK == 1:
            n = int(round(DIAL[0]))
            if n:
                self.featurise(n)
        x = torch.randn(2, 8, self.length, self.length, device=self.stage.device)
        y = (x[:, :1] > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.mix()
        self.opt.step()
        return loss.detach()


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("straggler_rank", "Replica.mix", kit.HEAVY, start=1500, tiny=100, least=10, alt="Replica.featurise"),
    }, "rank 1 prepares on the host before each step; rank 0 waits in all_reduce", window=0.7, settle=4)
    c = stage.pick(48, 64) if not stage.smoke else 8
    depth = stage.pick(10, 12, 14) if not stage.smoke else 2
    length = stage.pick(128, 160) if not stage.smoke else 24
    if RANK == 0:
        stage.child(PEER)
        stage.at_end(lambda: os.unlink(DIAL.path))
        stage.at_end(lambda: shutil.rmtree(MEET, ignore_errors=True))
    dist.init_process_group("gloo", init_method=f"file://{MEET}/store", rank=RANK, world_size=2)
    replica = Replica(stage, c, depth, length)
    count, trace = 0, []
    while True:
        if RANK == 0:
            DIAL[0] = stage.amount("a")
        loss = replica.step()
        count += 1
        if count % 10 == 0:
            trace.append(float(loss))
        if RANK == 0 and not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
