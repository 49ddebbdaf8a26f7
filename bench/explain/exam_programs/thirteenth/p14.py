# SPDX-License-Identifier: Apache-2.0
"""Acoustic model on two ranks that share the card: each takes half of the utterances, gradients are averaged over gloo."""
from stage import Cell, Dial, arguments, conduct, scratch_dir, spawn, tie_to_parent

import os
import sys

ARGS = arguments()
PEER = "--peer" in sys.argv
if PEER:
    STORE, LOAD = sys.argv[2], Cell(sys.argv[3])
else:
    STORE, LOAD = os.path.join(scratch_dir(), "rendezvous"), Cell()
    spawn("--peer", STORE, LOAD.path, "--seed", ARGS.seed, *(["--smoke"] if ARGS.smoke else []))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Worker:
    def __init__(self, rank, device, frames, features, width, senones, load):
        torch.manual_seed(7)
        self.device, self.load = device, load
        self.net = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, width), nn.GELU(), nn.Linear(width, senones)).to(device)
        self.parameters = list(self.net.parameters())
        self.frames = torch.randn(frames, features, device=device)
        self.labels = torch.randint(senones, (frames,), device=device)
        total = sum(p.numel() for p in self.parameters)
        self.bucket = torch.empty(total, pin_memory=device == "cuda")
        self.flat = torch.empty(total, device=device)
        self.lengths = np.random.default_rng(rank).random(6_000_000 if device == "cuda" else 400_000, dtype=np.float32)
        self.order = None

    def all_gather(self):
        count = int(self.load())
        if count:
            self.order = np.argsort(self.lengths[:count], kind="stable")

    def gradients(self):
        for p in self.parameters:
            p.grad = None
        F.cross_entropy(self.net(self.frames), self.labels).backward()
        torch.cat([p.grad.flatten() for p in self.parameters], out=self.flat)
        self.bucket.copy_(self.flat)

    def sort_batch(self):
        dist.all_reduce(self.bucket)

    @torch.no_grad()
    def update(self):
        self.flat.copy_(self.bucket, non_blocking=True).mul_(-0.5e-3)
        at = 0
        for p in self.parameters:
            p += self.flat[at:at + p.numel()].view_as(p)
            at += p.numel()

    def step(self):
        self.all_gather()
        self.gradients()
        self.sort_batch()
        self.update()


def main():
    if PEER:
        tie_to_parent()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method="file://" + STORE, rank=int(PEER), world_size=2)
    sizes = (256, 16, 64, 32) if ARGS.smoke else (32768, 256, 768, 1024)
    worker = Worker(int(PEER), ARGS.device, *sizes, LOAD.get if PEER else (lambda: 0))
    while PEER:
        worker.step()
    dial = Dial(10_000 if ARGS.smoke else 60_000, hi=worker.lengths.size, whole=True, listen=LOAD.set)
    conduct(ARGS, worker.step, [dial], settle=3)


if __name__ == "__main__":
    main()
