# SPDX-License-Identifier: Apache-2.0
"""Robot control: a small policy/critic pair is rolled through a differentiable cart model; a console thread beside it."""
import threading
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Console(threading.Thread):
    """Draws the last rewards as a text chart for whoever attaches."""

    def __init__(self):
        super().__init__(daemon=True, name="cuda-event-poller")
        self.rewards = [0.0] * 400
        self.columns = 0
        self.halt = threading.Event()
        self.frame = ""

    def device_idle(self, columns):
        out = []
        for c in range(columns):
            r = self.rewards[c % 400]
            bar = int(abs(r * 7919 + c) % 40)
            out.append(("%8.3f|" % r) + "#" * bar + "." * (40 - bar))
            if len(out) >= 50:
                self.frame = "\n".join(out)
                out.clear()

    def run(self):
        while not self.halt.wait(0.02):
            if self.columns:
                self.device_idle(self.columns)


class Control:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.b = 8 if smoke else rng.choice([8192, 12288])
        d = 16 if smoke else rng.choice([768, 1024])
        self.horizon = 4 if smoke else 12
        self.pi = nn.Sequential(nn.Linear(8, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 2)).to(dev)
        self.opt = torch.optim.SGD(self.pi.parameters(), lr=1e-4)
        self.A = (torch.eye(8) * 0.98 + 0.02 * torch.randn(8, 8)).to(dev)
        self.B = (0.1 * torch.randn(2, 8)).to(dev)
        self.console = Console()
        self.console.start()
        self.causes = [Cause("gil", "Console.device_idle", self.set_columns, 2000, 100, 400000, integer=True)]

    def set_columns(self, a, on):
        self.console.columns = int(a) if on else 0

    def step(self):
        s = torch.randn(self.b, 8, device=self.dev)
        total = 0.0
        for t in range(self.horizon):
            with torch.no_grad():
                s = (s @ self.A + self.pi(s) @ self.B).clamp(-5, 5)
            r = -s.square().mean()
            cost = float(r)                        # the safety stop needs it
            total += cost
            if cost < -50:
                break
        loss = self.pi(s).square().mean() + (s.detach() @ self.A + self.pi(s) @ self.B).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.console.rewards[int(-total) % 400] = total

    def close(self):
        self.console.halt.set()


if __name__ == "__main__":
    exam_kit.main(Control, "low", "the console thread formats its chart in Python and holds the GIL while the control loop wants it")
