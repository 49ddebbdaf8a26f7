# SPDX-License-Identifier: Apache-2.0
"""Policy rollout on a vectorised pendulum; the simulator keeps to a frame budget."""
import threading
import time

import stage
import torch
from torch import nn


def pacer():
    state = {"gap": 0.0, "frames": 0}

    def admit():
        state["frames"] += 1
        if state["gap"] > 0:
            time.sleep(state["gap"])
        return state["frames"]

    def gap(x):
        state["gap"] = x

    return admit, gap


def pendulum(n, dev):
    return torch.zeros(n, device=dev), torch.zeros(n, device=dev)


def advance(theta, omega, push):
    omega = (omega + 0.05 * (14.7 * torch.sin(theta) + 3.0 * push)).clamp(-8, 8)
    return theta + 0.05 * omega, omega


def rollout(opts, admit):
    s = opts.smoke
    n, h = (64, 16) if s else (16384, 1536)
    policy = nn.Sequential(nn.Linear(3, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(),
                           nn.Linear(h, 1)).to(opts.device)
    theta, omega = pendulum(n, opts.device)
    while True:
        reward = 0.0
        with torch.inference_mode():
            for _ in range(4):
                obs = torch.stack((theta.cos(), theta.sin(), omega), 1)
                theta, omega = advance(theta, omega, policy(obs).squeeze(1).tanh())
                reward = reward - theta.square().mean()
            score = reward.item()
        admit()
        yield score


def remote_wait(box):
    """Publishes the last score for a dashboard nobody reads."""
    while True:
        time.sleep(0.02)
        box["shown"] = box.get("last", 0.0)


def main():
    opts = stage.options()
    admit, gap = pacer()
    frames = rollout(opts, admit)
    box = {}
    threading.Thread(target=remote_wait, args=(box,), name="http-client", daemon=True).start()

    def frame():
        box["last"] = next(frames)

    stage.conduct(opts, frame, [
        stage.Factor("pause", "pacer.admit", "rollout", gap, 0.002),
    ], "heavy")


if __name__ == "__main__":
    main()
