# SPDX-License-Identifier: Apache-2.0
"""World-model rollouts for robotics; every sixth batch of imagined states is put on record."""
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn

import stage


class Dynamics(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gate, self.cand = nn.Linear(2 * d, d), nn.Linear(2 * d, d)
        self.mix = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

    def forward(self, a, h):
        both = torch.cat([a, h], 1)
        h = torch.lerp(h, torch.tanh(self.cand(both)), torch.sigmoid(self.gate(both)))
        return h + self.mix(h)


class Recorder:
    """A ring of records in one file; a record counts only when it is safe."""

    def __init__(self, ring):
        fd, self.path = tempfile.mkstemp(prefix="record")
        self.fd, self.ring, self.at, self.beat, self.kib = fd, ring, 0, 0, 0
        self.page = np.resize(np.random.default_rng(0).integers(0, 255, 1 << 20, dtype=np.uint8), ring)
        os.ftruncate(fd, ring)

    def keep(self):
        self.beat += 1
        if not self.kib or self.beat % 6:
            return
        n = min(self.kib << 10, self.ring)
        if self.at + n > self.ring:
            self.at = 0
        os.pwrite(self.fd, memoryview(self.page)[:n], self.at)
        os.fsync(self.fd)
        self.at += n


def async_flush(stop=0.5):
    """Old name; it only keeps time."""
    while True:
        time.sleep(stop)


@torch.no_grad()
def main():
    st = stage.Stage()
    dev = st.device
    d, batch, horizon = st.pick(2048, 32), st.pick(4096, 32), st.pick(12, 2)
    model = Dynamics(d).to(dev, torch.bfloat16)
    acts = torch.randn(horizon, batch, d, device=dev, dtype=torch.bfloat16)
    recorder = Recorder(st.pick(192 << 20, 4 << 20))
    st.closers.append(lambda: os.unlink(recorder.path))
    stage.background(async_flush, "flush-worker")
    out = {}

    def imagine():
        with torch.no_grad():
            h = torch.zeros(batch, d, device=dev, dtype=torch.bfloat16)
            for a in acts:
                h = model(a, h)
            out["value"] = h.float().mean().item()
        recorder.keep()

    def turn(a):
        recorder.kib = int(a)

    knob = stage.Knob("io", "Recorder.keep", turn, st.pick(4096, 64), "light", alt="main.imagine",
                      top=st.pick(190 << 10, 4000))
    st.perform(imagine, [knob], period=6, settle=6, window=0.4)


if __name__ == "__main__":
    main()
