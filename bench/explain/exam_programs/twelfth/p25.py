# SPDX-License-Identifier: Apache-2.0
"""Audio separation in training; every step leaves its notes in small ledgers."""
import stage
import json
import os
import threading

import torch
import torch.nn.functional as F
from torch import nn


class Ledger:
    """Sheets are rewritten whole; the head tells readers whether a sheet is complete."""

    def __init__(self, folder, sheets):
        self.folder, self.sheets = folder, sheets
        self.filler = os.urandom(1 << 16).hex().encode()[: 1 << 16]
        self.count = 0

    def commit(self, head):
        for k in range(int(self.sheets())):
            name = os.path.join(self.folder, f"sheet{k % 24:02d}")
            fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(fd, head)
            os.write(fd, self.filler)
            os.close(fd)

    def note(self, loss):
        self.count += 1
        self.commit(json.dumps({"n": self.count, "loss": loss}).encode())


class Separator(nn.Module):
    def __init__(self, bins, width, depth, sources=2):
        super().__init__()
        self.first = nn.Linear(bins, width)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                  for _ in range(depth))
        self.last = nn.Linear(width, bins * sources)

    def forward(self, spec):
        x = self.first(spec)
        for part in self.body:
            x = x + part(x)
        return self.last(x).sigmoid().chunk(2, -1)


class Idle:
    def __init__(self):
        self.cond = threading.Condition()
        threading.Thread(target=self.loop, name="sync-barrier", daemon=True).start()

    def loop(self):
        with self.cond:
            while True:
                self.cond.wait(0.2)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    bins, hop, batch, secs, width, depth = (65, 32, 2, 0.2, 64, 2) if tiny else (513, 256, 32, 4, 1536, 6)
    window = torch.hann_window(2 * (bins - 1), device=dev)
    net = Separator(bins, width, depth).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not tiny)
    sheets = stage.Dial(4 if tiny else 20)
    ledger = Ledger(stage.scratch_dir(), sheets)
    Idle()
    left, right = (torch.randn(batch, int(16000 * secs), device=dev) for _ in range(2))

    def step():
        mix = torch.stft(left + right, 2 * (bins - 1), hop, window=window, return_complex=True).abs().transpose(1, 2)
        goal = torch.stft(left, 2 * (bins - 1), hop, window=window, return_complex=True).abs().transpose(1, 2)
        with torch.autocast(dev, torch.bfloat16, enabled=not tiny):
            a, b = net(mix)
            loss = F.l1_loss(a * mix, goal) + F.l1_loss(b * mix, mix - goal)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        ledger.note(loss.item())

    stage.conduct(args, step, [sheets])


if __name__ == "__main__":
    main()
