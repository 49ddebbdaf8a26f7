# SPDX-License-Identifier: Apache-2.0
"""On-policy reinforcement learning: rollouts are scored on the host, the policy is updated on the device."""
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Policy(nn.Module):
    def __init__(self, obs, hidden, acts):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                  nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.pi, self.v = nn.Linear(hidden, acts), nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


class Rollout:
    def __init__(self, seed, most):
        rng = random.Random(seed)
        self.rewards = [rng.random() - 0.4 for _ in range(most)]
        self.values = [rng.random() for _ in range(most + 1)]
        self.done = [rng.random() < 0.02 for _ in range(most)]
        self.steps = 0

    def advantages(self, gamma=0.99, lam=0.95):
        """Generalised advantage estimates, newest step first."""
        last, out = 0.0, []
        for t in range(self.steps - 1, -1, -1):
            alive = 0.0 if self.done[t] else 1.0
            delta = self.rewards[t] + gamma * self.values[t + 1] * alive - self.values[t]
            last = delta + gamma * lam * alive * last
            out.append(last)
        return sum(out) / len(out) if out else 0.0


class FrameStack:
    """Pixels that belong to the sampled transitions."""

    def __init__(self, pixels, dev):
        self.store = torch.randint(0, 255, (1 << 18,), dtype=torch.uint8).repeat(pixels >> 18)
        self.dev, self.count = dev, 0

    def gather(self):
        if not self.count:
            return 0.0
        frames = self.store[: self.count].to(self.dev)
        return frames[::4096].float().mean() / 255


def actor_wait_lock(flag):
    while True:
        time.sleep(0.15)
        flag[0] += 1


def main():
    st = stage.Stage()
    dev = st.device
    n, obs = st.pick(32768, 256), st.pick(512, 16)
    net = Policy(obs, st.pick(2048, 32), 18).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4, fused=not st.smoke)
    states = torch.randn(n, obs, device=dev)
    actions = torch.randint(0, 18, (n,), device=dev)
    rollout = Rollout(st.seed, st.pick(400_000, 40_000))
    frames = FrameStack(st.pick(192 << 20, 1 << 22), dev)
    stage.background(actor_wait_lock, "actor-lock", [0])
    stats = {}

    def iterate():
        adv = rollout.advantages()
        shift = frames.gather()
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits, value = net(states + shift)
        logp = F.log_softmax(logits.float(), -1).gather(1, actions[:, None]).squeeze(1)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * (adv - value.detach().float())).mean() + 0.5 * (value.float() - adv).pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        stats["loss"] = loss.item()

    def turn_a(a):
        rollout.steps = int(a)

    def turn_b(a):
        frames.count = int(a)

    knobs = [stage.Knob("host_code", "Rollout.advantages", turn_a, st.pick(20_000, 2000), "pair", alt="main.iterate",
                        top=st.pick(400_000, 40_000)),
             stage.Knob("copies", "FrameStack.gather", turn_b, st.pick(30 << 20, 1 << 19), "pair", alt="main.iterate",
                        top=st.pick(192 << 20, 1 << 22))]
    st.perform(iterate, knobs)


if __name__ == "__main__":
    main()
