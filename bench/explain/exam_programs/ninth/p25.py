# SPDX-License-Identifier: Apache-2.0
"""Motif scan over DNA reads: one-hot reads against a bank of position weight matrices."""
import kit
import mmap
import threading
import time
import numpy as np
import torch


class Reads:
    """A source of encoded reads; the lane's raw cells are staged page-wise before they are decoded."""

    def __init__(self, stage, batch, length):
        self.stage, self.batch, self.length = stage, batch, length
        self.codes = np.random.default_rng(2).integers(0, 4, (batch + 4096, length), dtype=np.int64).astype(np.uint8)
        self.kept = None
        self.at = 0

    def lane(self, cells):
        if self.stage.on("a"):
            return np.frombuffer(mmap.mmap(-1, cells * 4096), dtype=np.uint8)
        if self.kept is None or len(self.kept) < cells * 4096:
            self.kept = np.ones(cells * 4096 * 5 // 4, dtype=np.uint8)
        return self.kept[:cells * 4096]

    def __next__(self):
        cells = max(1, int(self.stage.size("a")))
        raw = self.lane(cells).reshape(cells, 4096)
        raw[:, :16] = self.codes[self.at, :16]
        self.at = (self.at + 131) % 4096
        return self.codes[self.at:self.at + self.batch], raw[0, 0]


class Motifs(torch.nn.Module):
    def __init__(self, count, span, width):
        super().__init__()
        self.bank = torch.nn.Conv1d(4, count, span)
        self.mix = torch.nn.Conv1d(count, width, 9, stride=4)

    def forward(self, codes):
        x = torch.nn.functional.one_hot(codes.long(), 4).transpose(1, 2).float()
        return self.mix(torch.relu(self.bank(x))).amax(-1)


def report(state):
    while True:
        time.sleep(0.25)
        state["rate"] = state["reads"]


@torch.inference_mode()
def scan(stage):
    batch = stage.pick(1024, 1536, 2048) if not stage.smoke else 8
    length = stage.pick(384, 512) if not stage.smoke else 64
    model = Motifs(stage.pick(192, 256) if not stage.smoke else 8, 15, 128 if not stage.smoke else 8).to(stage.device).eval()
    source = Reads(stage, batch, length)
    slab = torch.zeros(batch, length, dtype=torch.uint8, pin_memory=stage.cuda)
    state = {"reads": 0, "rate": 0}
    threading.Thread(target=report, args=(state,), name="prefetch", daemon=True).start()
    while True:
        codes, first = next(source)
        slab.numpy()[:] = codes
        best = model(slab.to(stage.device, non_blocking=True))
        state["reads"] += len(best.argmax(1).tolist()) + int(first) * 0
        if not stage.tick():
            return


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("memory", "Reads.__next__", kit.LIGHT, start=3000, tiny=50, least=16, most=400_000, moving=True, alt="Reads.lane"),
    }, "every batch touches freshly mapped pages")
    scan(stage)
    stage.leave()
