# SPDX-License-Identifier: Apache-2.0
"""Weather rollout: boundary tiles come from an archive file, the state is filtered in a spectral basis."""
import os
import random

import stage
import torch
from torch import nn


class Tiles:
    def __init__(self, folder, total, tile):
        path = os.path.join(folder, "tiles.bin")
        chunk = os.urandom(1 << 20)
        with open(path, "wb") as f:
            for _ in range(max(1, total >> 20)):
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
        self.fd = os.open(path, os.O_RDONLY)
        os.unlink(path)
        self.total, self.tile = total, tile
        self.page = bytearray(tile)
        self.rng = random.Random(4)
        self.quota = stage.Quota()

    def read(self):
        for _ in range(self.quota.take()):
            at = self.rng.randrange(self.total // self.tile) * self.tile
            os.preadv(self.fd, [self.page], at)
            os.posix_fadvise(self.fd, at, self.tile, os.POSIX_FADV_DONTNEED)
        return self.page[0]


class Spectral:
    def __init__(self, d, device):
        q = torch.linalg.qr(torch.randn(d, d))[0]
        self.basis = q.to(device)
        self.taps = torch.linspace(1, 0.5, d, device=device)
        self.rows = 0

    def filter(self, field):
        n = min(int(self.rows), field.shape[0])
        if n:
            field = torch.cat((((field[:n] @ self.basis) * self.taps) @ self.basis.t(), field[n:]))
        return field

    def set_rows(self, x):
        self.rows = x


class Model(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(d, d) for _ in range(n))

    def forward(self, x):
        for m in self.mix:
            x = x + 0.1 * torch.tanh(m(x))
        return x


def main():
    opts = stage.options()
    s = opts.smoke
    torch.manual_seed(opts.seed)
    d, rows = (64, 512) if s else (1024, 65536)
    tiles = Tiles(stage.scratch_dir(), (4 if s else 64) << 20, 65536)
    spectral = Spectral(d, opts.device)
    dt = torch.float32 if s else torch.bfloat16
    net = Model(d, 2 if s else 12).to(opts.device, dt)
    start = torch.randn(rows, d, device=opts.device)

    @torch.inference_mode()
    def advance():
        edge = tiles.read()
        field = net(start.to(dt)).float() + edge * 1e-3
        field = spectral.filter(field)
        return field[:, 0].abs().amax().item()

    stage.conduct(opts, advance, [
        stage.Factor("io", "Tiles.read", "", tiles.quota.set, 3.0, 20000.0),
        stage.Factor("device_compute", "Spectral.filter", "", spectral.set_rows, 8000.0, float(rows)),
    ], "pair")


if __name__ == "__main__":
    main()
