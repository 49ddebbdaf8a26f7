# SPDX-License-Identifier: Apache-2.0
"""Policy-gradient learner: vectorised environment on the device, returns computed on the host."""
import threading
import numpy as np
import torch
import torch.nn as nn
from rig import Kit, DEV


class Policy(nn.Module):
    def __init__(self, obs, d, actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())
        self.pi, self.v = nn.Linear(d, actions), nn.Linear(d, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


class Cartworld:
    def __init__(self, envs, obs):
        self.s = torch.randn(envs, obs, device=DEV)
        self.push = torch.randn(4, obs, device=DEV) * 0.1

    def step(self, action):
        self.s = 0.98 * self.s + self.push[action] + 0.01 * torch.randn_like(self.s)
        return -self.s.square().mean(1)


def bootstrap(reward, value, gamma, lam):
    """advantages of one trajectory"""
    out = [0.0] * len(reward)
    acc, nxt = 0.0, 0.0
    for t in range(len(reward) - 1, -1, -1):
        delta = reward[t] + gamma * nxt - value[t]
        acc = delta + gamma * lam * acc
        out[t] = acc
        nxt = value[t]
    return out


def bootstrap_all(reward, value, gamma, lam):
    out = np.empty_like(reward)
    acc, nxt = np.zeros(reward.shape[1], np.float32), np.zeros(reward.shape[1], np.float32)
    for t in range(len(reward) - 1, -1, -1):
        acc = reward[t] + gamma * nxt - value[t] + gamma * lam * acc
        out[t] = acc
        nxt = value[t]
    return out


def env_step_slow(scores, r):
    """rolling score of the last updates; cheap in spite of its name"""
    scores.append(r)
    del scores[:-20]
    return sum(scores) / len(scores)


class Learner:
    def __init__(self, envs, obs, d, horizon, epochs):
        self.pol = Policy(obs, d, 4).to(DEV)
        self.opt = torch.optim.Adam(self.pol.parameters(), 3e-4, foreach=True)
        self.env = Cartworld(envs, obs)
        self.horizon, self.epochs, self.loops = horizon, epochs, 0

    @torch.no_grad()
    def collect(self):
        obs, act, rew, val = [], [], [], []
        for _ in range(self.horizon):
            logit, v = self.pol(self.env.s)
            a = (logit - torch.empty_like(logit).exponential_().log()).argmax(1)
            obs.append(self.env.s)
            act.append(a)
            val.append(v)
            rew.append(self.env.step(a))
        return torch.stack(obs), torch.stack(act), torch.stack(rew).cpu().numpy(), torch.stack(val).cpu().numpy()

    def advantages(self, rew, val, slow):
        adv = bootstrap_all(rew, val, 0.99, 0.95)
        if slow:
            for n in range(self.loops):
                e = n % rew.shape[1]
                adv[:, e] = bootstrap(rew[:, e].tolist(), val[:, e].tolist(), 0.99, 0.95)
        return adv

    def update(self, slow=False):
        obs, act, rew, val = self.collect()
        adv = torch.from_numpy(self.advantages(rew, val, slow)).to(DEV)
        for _ in range(self.epochs):
            logit, v = self.pol(obs)
            lp = logit.log_softmax(-1).gather(-1, act[..., None]).squeeze(-1)
            loss = -(lp * adv).mean() + 0.5 * (v - adv).square().mean()
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
        return loss.item()


def main():
    kit = Kit(__file__)
    rng = kit.rng
    lr = Learner(kit.n(rng.choice([512, 768, 1024]), 8), kit.n(64, 4), kit.n(rng.choice([512, 768]), 16),
                 kit.n(rng.choice([24, 32, 48]), 4), kit.n(rng.choice([3, 4]), 1))
    threading.Thread(target=threading.Event().wait, name="env-worker-0", daemon=True).start()
    base, _ = kit.measure(lr.update, 20)
    share = kit.share(0.24)
    row = np.random.rand(lr.horizon).astype(np.float32)
    unit = kit.unit(lambda: bootstrap(row.tolist(), row.tolist(), 0.99, 0.95), 200) + 1e-6
    lr.loops = max(1, round(base * share / (1 - share) / unit))
    kit.cause("host_code", kit.place(bootstrap, "acc = delta"),
              "advantages are computed per trajectory in pure Python", "bootstrap")
    scores = []
    for i in kit.steps(warm=8):
        env_step_slow(scores, lr.update(kit.on))


if __name__ == "__main__":
    main()
