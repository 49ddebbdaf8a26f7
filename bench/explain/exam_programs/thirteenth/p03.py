# SPDX-License-Identifier: Apache-2.0
"""Off-policy Q-learning: one learner, a replay memory on the device, and a thread that stamps snapshots for actors."""
import hashlib
import os
import queue
import threading

from stage import Dial, arguments, conduct

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 32 * 1024


class Snapshots:
    def __init__(self, amount):
        self.amount = amount
        self.version, self.mark = 0, ""
        self.guard = threading.Lock()
        self.orders = queue.Queue()
        self.blob = memoryview(os.urandom(256 * CHUNK))
        threading.Thread(target=self.prefetch, name="prefetch", daemon=True).start()

    def prefetch(self):
        while True:
            self.version = self.orders.get()
            with self.guard:
                digest = hashlib.sha256()
                for k in range(self.amount()):
                    at = k % 256 * CHUNK
                    digest.update(self.blob[at:at + CHUNK])
                self.mark = digest.hexdigest()


class Learner:
    def __init__(self, device, memory, batch, features, width, seed, amount):
        torch.manual_seed(seed)
        self.batch, self.device = batch, device
        self.state = torch.randn(memory, features, device=device)
        self.reward = torch.randn(memory, device=device)
        self.priority = torch.rand(memory)
        make = lambda: nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                     nn.Linear(width, 16)).to(device)
        self.online, self.target = make(), make()
        self.optim = torch.optim.Adam(self.online.parameters(), lr=1e-4)
        self.snapshots = Snapshots(amount)
        self.count, self.tag, self.loss = 0, "", 0.0

    def draw(self):
        noise = torch.rand(self.priority.numel())
        return noise.mul_(self.priority).topk(self.batch, sorted=False).indices

    def compute_gradient_norm(self):
        with self.snapshots.guard:
            self.tag = self.snapshots.mark[:8]

    def step(self):
        self.count += 1
        self.snapshots.orders.put(self.count)
        rows = self.draw().to(self.device)
        self.compute_gradient_norm()
        states, reward = self.state[rows], self.reward[rows]
        with torch.no_grad():
            goal = reward + 0.99 * self.target(states.roll(1, 0)).amax(1)
        loss = F.smooth_l1_loss(self.online(states)[:, 0], goal)
        self.optim.zero_grad(set_to_none=True)
        loss.backward()
        self.optim.step()
        self.loss = loss.item()


def main():
    args = arguments()
    if args.smoke:
        dial = Dial(20, hi=20000, whole=True)
        learner = Learner(args.device, 4096, 256, 16, 64, args.seed, dial)
    else:
        dial = Dial(120, hi=20000, whole=True)
        learner = Learner(args.device, 100_000, 16384, 512, 2048, args.seed, dial)
    conduct(args, learner.step, [dial], settle=3)


if __name__ == "__main__":
    main()
