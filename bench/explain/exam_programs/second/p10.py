# SPDX-License-Identifier: Apache-2.0
"""Ranking of documents; finished pages are archived on the side."""
import os, threading, zlib
import torch
from rig import Kit, DEV


class Archive(threading.Thread):
    def __init__(self, kit, name):
        super().__init__(name=name, daemon=True)
        self.kit, self.size = kit, 0
        self.page = os.urandom(1 << 16) * 8

    def press(self):
        self.size += len(zlib.compress(self.page, 5))

    def run(self):
        idle = threading.Event()
        while True:
            if self.kit.on:
                self.press()
            else:
                idle.wait(0.05)


def main(kit):
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    d, depth = kit.n(kit.rng.choice([128, 192, 256]), 16), kit.n(40, 3)
    w = [torch.randn(d, d, device=DEV) / d ** 0.5 for _ in range(depth)]
    x0 = torch.randn(kit.n(256, 8), d, device=DEV)
    crew = [Archive(kit, "MainLoop_%d" % i) for i in range(kit.rng.choice([3, 4]))]
    for t in crew:
        t.start()
    kit.cause("cpu_starvation", kit.place(Archive.press, "zlib.compress"), "%d own threads on 2 pinned cores; they do not hold the GIL" % len(crew))
    with torch.no_grad():
        for it in kit.steps():
            x = x0
            for m in w:
                x = torch.tanh(x @ m + x).mul(0.9).clamp(-3, 3)
            if it % 8 == 7:
                x[:, 0].sort().indices[:10].tolist()


if __name__ == "__main__":
    main(Kit(__file__))
