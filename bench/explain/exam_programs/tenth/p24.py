# SPDX-License-Identifier: Apache-2.0
"""A neural ODE is integrated with Runge-Kutta stages whose error estimates steer the step size."""
import time

import torch
from torch import nn

import stage


class Field(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, h):
        return self.b(torch.nn.functional.gelu(self.a(h)))


class Controller:
    """Looks at the error of a stage; beyond the limit the step is made shorter."""

    def __init__(self, limit):
        self.limit, self.looks, self.used, self.shrunk = limit, 0, 0, 0

    def begin(self):
        self.used = 0

    def accept(self, err):
        self.used += 1
        if self.used <= self.looks and abs(err.item()) > self.limit:
            self.shrunk += 1
            return False
        return True


class Integrator:
    def __init__(self, field, controller, substeps):
        self.field, self.control, self.substeps = field, controller, substeps

    def run(self, h):
        dt = 1.0 / self.substeps
        self.control.begin()
        err = torch.zeros((), device=h.device)
        for _ in range(self.substeps):
            total = None
            for c in (0.5, 0.5, 1.0, 1.0):
                k = self.field(h if total is None else torch.add(h, k, alpha=dt * c))
                total = k if total is None else total + k
                err = k[0, 0]
                if not self.control.accept(err):
                    dt *= 0.5
            h = torch.add(h, total, alpha=dt / 4)
        return h, err


def callbacks(box):
    """The viewer asks for the progress ten times a second."""
    while True:
        time.sleep(0.1)
        box["seen"] = box.get("step", 0)


@torch.no_grad()
def main():
    st = stage.Stage()
    dev = st.device
    d, rows = st.pick(1024, 32), st.pick(8192, 64)
    field = Field(d).to(dev, torch.bfloat16)
    solver = Integrator(field, Controller(1e9), st.pick(30, 5))
    x = torch.randn(rows, d, device=dev, dtype=torch.bfloat16)
    box = {}
    stage.background(callbacks, "host-callback-sleep", box)

    def solve():
        with torch.no_grad():
            out, err = solver.run(x)
        box["step"] = box.get("step", 0) + 1
        if box["step"] % 25 == 0:
            box["err"] = err.item()

    def turn(a):
        solver.control.looks = int(a)

    knob = stage.Knob("synchronization", "Controller.accept", turn, st.pick(60, 10), "light", alt="Integrator.run",
                      top=st.pick(120, 20))
    st.perform(solve, [knob])


if __name__ == "__main__":
    main()
