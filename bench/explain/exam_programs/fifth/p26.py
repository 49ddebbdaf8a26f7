# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Actor-critic on many small grid worlds: the policy runs on the device, the worlds on the host."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk

MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]


class GridWorlds:
    def __init__(self, seed, count, side):
        self.rng = np.random.default_rng(seed)
        self.count, self.side = count, side
        self.pos = self.rng.integers(0, side, (count, 2))
        self.goal = self.rng.integers(0, side, (count, 2))
        self.moves = np.array(MOVES)
        self.manual = 0

    def advance(self, actions):
        k = self.manual
        reward = np.zeros(self.count, dtype=np.float32)
        for i in range(k):
            dy, dx = MOVES[actions[i]]
            y = min(max(int(self.pos[i, 0]) + dy, 0), self.side - 1)
            x = min(max(int(self.pos[i, 1]) + dx, 0), self.side - 1)
            self.pos[i, 0], self.pos[i, 1] = y, x
            if y == self.goal[i, 0] and x == self.goal[i, 1]:
                reward[i] = 1.0
                self.pos[i, 0], self.pos[i, 1] = 0, 0
        if k < self.count:
            p = np.clip(self.pos[k:] + self.moves[actions[k:]], 0, self.side - 1)
            hit = (p == self.goal[k:]).all(1)
            reward[k:] = hit
            p[hit] = 0
            self.pos[k:] = p
        return reward


class RolloutStore:
    """Feature maps of the last rollouts, for the auxiliary loss."""

    def __init__(self, slots):
        self.slots, self.ring, self.n = slots, [], 0
        self.afar = 0

    def keep(self, feat):
        k = self.afar
        far = feat[:k].float().cpu() if k else None
        entry = (far, feat[k:].clone() if k < len(feat) else None)
        if len(self.ring) < self.slots:
            self.ring.append(entry)
        else:
            self.ring[self.n % self.slots] = entry
        self.n += 1


class ActorCritic(nn.Module):
    def __init__(self, side, w):
        super().__init__()
        self.emb = nn.Linear(4, w * 4)
        self.w = w
        self.conv = nn.Sequential(nn.Conv2d(w, 2 * w, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU())
        self.plane = nn.Parameter(torch.randn(1, w, 8, 8))
        self.pi, self.v = nn.Linear(w, 4), nn.Linear(w, 1)

    def forward(self, obs):
        x = self.emb(obs).view(-1, self.w, 2, 2)
        x = F.interpolate(x, size=(8, 8)) * self.plane
        feat = self.conv(x)
        z = feat.mean((2, 3))
        return feat, self.pi(z), self.v(z).squeeze(-1)


class Learner:
    def __init__(self, o):
        count, side, w = (16, 8, 8) if o.smoke else (o.rng.choice([4096, 5120, 6144]), 32, 128)
        self.o = o
        self.worlds = GridWorlds(o.seed, count, side)
        self.net = ActorCritic(side, w).to(o.device, memory_format=torch.channels_last)
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-4, fused=o.gpu)
        self.store = RolloutStore(3)
        self.obs = torch.empty(count, 4, pin_memory=o.gpu)

    def gc_friendly_step(self):
        w = self.worlds
        self.obs.copy_(torch.from_numpy(np.concatenate([w.pos, w.goal], 1) / w.side))
        x = self.obs.to(self.o.device, non_blocking=True)
        with torch.autocast(self.o.device.type, dtype=torch.bfloat16):
            feat, logits, value = self.net(x)
        a = torch.distributions.Categorical(logits=logits.detach().float(), validate_args=False).sample()
        self.store.keep(feat.detach())
        reward = w.advance(a.cpu().numpy())
        r = torch.from_numpy(reward).to(self.o.device)
        adv = r - value.float()
        logp = F.log_softmax(logits.float(), -1).gather(1, a[:, None]).squeeze(1)
        loss = -(logp * adv.detach()).mean() + 0.5 * adv.square().mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()


def main():
    o = bk.options()
    share = o.rng.uniform(0.30, 0.44)
    job = Learner(o)
    step, n = job.gc_friendly_step, job.worlds.count
    bk.mean_step(step, 0.1 if o.smoke else 1.0, o.device)
    base = bk.mean_step(step, o.probe, o.device)
    goal = base / (1 - share)
    mid = (base + goal) / 2

    def afar(k):
        job.store.afar = k
        return bk.mean_step(step, o.probe, o.device)

    def manual(k):
        job.worlds.manual = k
        return bk.mean_step(step, o.probe, o.device)

    far = bk.tune(afar, base, 1 - base / mid, max(1, n // 16), n)
    at = afar(far)
    want = at + max(0.05 * base, (goal - base) / 2)
    hand = bk.tune(manual, at, 1 - at / want, max(1, n // 8), n)

    def both():
        job.store.afar, job.worlds.manual = far, hand

    def none():
        job.store.afar, job.worlds.manual = 0, 0

    on, off = bk.two_phases(step, o, both, none)
    bk.truth(on, off, ["copies", "host_code"], ["RolloutStore.keep", "GridWorlds.advance"],
             f"feature maps of {far} worlds copied to pageable memory (about "
             f"{(at - base) / max(on - off, 1e-6):.2f} of the loss); {hand} of {n} worlds moved one by one in Python")


if __name__ == "__main__":
    main()
