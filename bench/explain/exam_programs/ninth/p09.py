# SPDX-License-Identifier: Apache-2.0
"""Deep Q-learning in a grid world: the worlds live on the device, the replay memory is a chain of records."""
import kit
import gc
import random
import torch
from torch import nn


class Record:
    def __init__(self, slot, action, reward, before):
        self.slot, self.action, self.reward = slot, action, reward
        self.before, self.after = before, None
        if before is not None:
            before.after = self
        self.tags = {"age": slot}


class Memory:
    def __init__(self, capacity):
        self.capacity = capacity
        self.records = []
        self.at = 0

    def add(self, slot, action, reward):
        before = self.records[self.at - 1] if self.records else None
        r = Record(slot, action, reward, before)
        if len(self.records) < self.capacity:
            self.records.append(r)
        else:
            old = self.records[self.at % self.capacity]
            if old.after is not None:
                old.after.before = None
            self.records[self.at % self.capacity] = r
        self.at = (self.at + 1) % self.capacity

    def compact(self, n):
        for _ in range(n):
            gc.collect()

    def sample(self, k):
        return [self.records[random.randrange(len(self.records))].slot for _ in range(k)]


class Worlds:
    def __init__(self, stage, count, side):
        self.device, self.side = stage.device, side
        self.pos = torch.randint(0, side, (count, 2), device=self.device)
        self.goal = torch.randint(0, side, (count, 2), device=self.device)
        self.moves = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]], device=self.device)

    def view(self):
        n = len(self.pos)
        img = torch.zeros(n, 2, self.side, self.side, device=self.device)
        i = torch.arange(n, device=self.device)
        img[i, 0, self.pos[:, 0], self.pos[:, 1]] = 1.0
        img[i, 1, self.goal[:, 0], self.goal[:, 1]] = 1.0
        return img

    def move(self, action):
        self.pos = (self.pos + self.moves[action]).clamp(0, self.side - 1)
        done = (self.pos == self.goal).all(1)
        fresh = torch.randint(0, self.side, self.goal.shape, device=self.device)
        self.goal = torch.where(done[:, None], fresh, self.goal)
        return done.float()


def qnet(width, side):
    return nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(width * side * side, 256), nn.ReLU(), nn.Linear(256, 4))


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("gc", "Memory.compact", kit.LIGHT, start=0.12, least=0.004, most=50),
    }, "a full collection over the replay memory every few steps", window=0.8)
    random.seed(stage.args.seed)
    side = 12 if not stage.smoke else 6
    worlds = Worlds(stage, stage.pick(1024, 1536, 2048) if not stage.smoke else 16, side)
    width = stage.pick(64, 96) if not stage.smoke else 8
    net, slow = qnet(width, side).to(stage.device), qnet(width, side).to(stage.device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4, foreach=True)
    memory = Memory(stage.pick(40_000, 60_000) if not stage.smoke else 500)
    gc.collect()
    gc.freeze()
    for i in range(memory.capacity):
        memory.add(i % len(worlds.pos), 0, 0.0)
    before = worlds.view()
    while True:
        with torch.no_grad():
            action = net(before).argmax(1)
        reward = worlds.move(action)
        after = worlds.view()
        for i, (a, r) in enumerate(zip(action[:64].tolist(), reward[:64].tolist())):
            memory.add(i, a, r)
        pick = torch.tensor(memory.sample(256 if not stage.smoke else 8), device=stage.device)
        memory.compact(stage.times("a"))
        with torch.no_grad():
            target = reward[pick] + 0.98 * slow(after[pick]).amax(1)
        got = net(before[pick]).gather(1, action[pick, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(got, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(slow.parameters(), net.parameters()):
                p.lerp_(q, 0.01)
        before = after
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
