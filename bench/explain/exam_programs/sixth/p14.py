# SPDX-License-Identifier: Apache-2.0
"""PPO on a vectorised pursuit game: rollout with the policy on the device, then a few updates."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p14")
ENVS = job.size([1024, 1536, 2048], 16)
HORIZON = job.size([16, 24], 4)
HID = job.size([512, 768], 16)
OBS, ACTS = 24, 6


class Pursuit:
    def __init__(self):
        self.rng = np.random.default_rng(job.seed)
        self.pos = self.rng.standard_normal((ENVS, OBS // 2)).astype(np.float32)
        self.vel = np.zeros_like(self.pos)
        self.push = self.rng.standard_normal((ACTS, OBS // 2)).astype(np.float32) * 0.1

    def act(self, a):
        self.vel = 0.95 * self.vel + self.push[a]
        self.pos = np.clip(self.pos + 0.1 * self.vel, -3, 3)
        return np.concatenate([self.pos, self.vel], 1), -np.abs(self.pos).mean(1), self.rng.random(ENVS) < 0.02


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, HID), nn.Tanh(), nn.Linear(HID, HID), nn.Tanh())
        self.pi, self.v = nn.Linear(HID, ACTS), nn.Linear(HID, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


class Rollout:
    """Rewards of several objectives are discounted row by row so that episode ends can be honoured."""

    def __init__(self):
        self.rows = 0
        self.rew = np.zeros((HORIZON, ENVS), np.float32)
        self.end = np.zeros((HORIZON, ENVS), bool)
        self.val = np.zeros((HORIZON, ENVS), np.float32)

    def vectorised(self):
        out, acc = np.zeros_like(self.rew), np.zeros(ENVS, np.float32)
        for t in range(HORIZON - 1, -1, -1):
            acc = self.rew[t] + 0.99 * acc * ~self.end[t]
            out[t] = acc
        return out

    def stream_wait(self, returns):
        for k in range(self.rows):
            e = k % ENVS
            acc, col = 0.0, []
            for r, d in zip(self.rew[::-1, e].tolist(), self.end[::-1, e].tolist()):
                acc = r + (0.0 if d else 0.99 * acc)
                col.append(acc)
            returns[:, e] = col[::-1]
        return returns


class Learner:
    def __init__(self):
        self.env, self.roll = Pursuit(), Rollout()
        self.net = Policy().to(job.dev)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-4, foreach=True)
        self.obs = np.zeros((ENVS, OBS), np.float32)

    def iteration(self):
        seen, acts = [], []
        with torch.no_grad():
            for t in range(HORIZON):
                x = torch.from_numpy(self.obs.astype(np.float32)).to(job.dev)
                logits, v = self.net(x)
                a = torch.distributions.Categorical(logits=logits, validate_args=False).sample()
                seen.append(x)
                acts.append(a)
                self.roll.val[t] = v.cpu().numpy()
                self.obs, self.roll.rew[t], self.roll.end[t] = self.env.act(a.cpu().numpy())
        ret = self.roll.stream_wait(self.roll.vectorised())
        adv = torch.from_numpy(ret - self.roll.val).to(job.dev).view(-1)
        target = torch.from_numpy(ret).to(job.dev).view(-1)
        x, a = torch.cat(seen), torch.cat(acts)
        for _ in range(3):
            logits, v = self.net(x)
            lp = F.log_softmax(logits, 1).gather(1, a[:, None]).squeeze(1)
            loss = -(lp * adv).mean() + 0.5 * F.mse_loss(v, target)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()


def main():
    L = Learner()

    def rows(n, on):
        L.roll.rows = int(n) if on else 0
    c = kit.Cause("host_code", "Rollout.stream_wait", rows, job.share(0.14, 0.19), job.size(800, 10), 5, 500_000)
    kit.examine(job, [c], "returns are discounted environment by environment in pure Python although a vectorised pass exists",
                step=L.iteration)


if __name__ == "__main__":
    main()
