# SPDX-License-Identifier: Apache-2.0
"""Seismic facies segmentation: 2-D sections cut from a compressed survey, small conv net, one reader thread."""
import queue, threading, zlib
import numpy as np
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class SurveyReader(threading.Thread):
    """Cuts crops out of a survey held as deflated panels."""

    def __init__(self, rng, panel, crops):
        super().__init__(daemon=True, name="gpu-feeder")
        g = np.random.default_rng(rng.randrange(1 << 30))
        base = np.cumsum(g.integers(-3, 4, size=(8, panel, panel)), axis=1).astype(np.int16)
        self.packed = [zlib.compress(b.tobytes(), 1) for b in base]
        self.panels = [b.astype(np.int16) for b in base]
        self.panel, self.crops = panel, crops
        self.reopen = 0.0            # panels inflated per crop
        self.credit = 0.0
        self.ready = queue.Queue(maxsize=2)
        self.halt = False
        self.g = g

    def traces(self, i):
        raw = zlib.decompress(self.packed[i])
        return np.frombuffer(raw, dtype=np.int16).reshape(self.panel, self.panel)

    def section(self, i):
        self.credit += self.reopen
        src = self.panels[i]
        while self.credit >= 1.0:
            self.credit -= 1.0
            src = self.traces(i)
        c = self.panel // 2
        y, x = self.g.integers(0, c, 2)
        return src[y:y + c, x:x + c]

    def run(self):
        k = 0
        while not self.halt:
            batch = np.stack([self.section((k + j) % 8) for j in range(self.crops)])
            k += 1
            t = torch.from_numpy(batch)
            while not self.halt:
                try:
                    self.ready.put(t, timeout=0.2)
                    break
                except queue.Full:
                    pass


class FaciesJob:
    def __init__(self, rng, smoke, dev):
        panel = 64 if smoke else rng.choice([640, 768])
        w = 8 if smoke else rng.choice([96, 128])
        self.dev = dev
        self.reader = SurveyReader(rng, panel, 2 if smoke else 6)
        self.net = nn.Sequential(nn.Conv2d(1, w, 5, padding=2), nn.GELU(), nn.Conv2d(w, w, 3, padding=1), nn.GELU(),
                                 nn.Conv2d(w, w, 3, padding=1), nn.GELU(), nn.Conv2d(w, 6, 1)).to(dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.reader.start()
        self.causes = [Cause("input_pipeline", "SurveyReader.traces", self.set_reopen, 1.0, 0.05, 400, mode="max",
                             also="FaciesJob.wait_for_gpu")]

    def set_reopen(self, a, on):
        self.reader.reopen = a if on else 0.0
        for _ in range(4):            # let queued crops of the old kind pass
            self.reader.ready.get()

    def wait_for_gpu(self):
        return self.reader.ready.get()

    def step(self):
        x = self.wait_for_gpu().to(self.dev).float().unsqueeze(1) / 256
        out = self.net(x)
        target = (x.squeeze(1).abs() * 3).long().clamp(0, 5)
        loss = nn.functional.cross_entropy(out, target)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.last = loss.item()

    def close(self):
        self.reader.halt = True


if __name__ == "__main__":
    exam_kit.main(FaciesJob, "high", "one reader thread inflates whole panels again for every crop; the trainer waits for it")
