# SPDX-License-Identifier: Apache-2.0
"""Monte-Carlo pricing of basket options: correlated paths, payoffs, a ledger of quotes."""
import kit
import os
import struct
import tempfile
import torch


class Ledger:
    def __init__(self, folder):
        self.fd, self.path = tempfile.mkstemp(prefix="ledger", dir=folder)
        self.page = os.urandom(64 << 10)

    def post(self, quote, pages):
        for _ in range(pages):
            os.pwrite(self.fd, struct.pack("d", quote) + self.page, 0)
            os.fsync(self.fd)

    def close(self):
        os.close(self.fd)
        os.unlink(self.path)


class Desk:
    def __init__(self, stage, paths, assets, dates):
        d = stage.device
        self.stage, self.dates = stage, dates
        a = torch.randn(assets, assets, device=d) / assets ** 0.5
        self.root = torch.linalg.cholesky(a @ a.T + torch.eye(assets, device=d))
        self.spot = torch.full((assets,), 100.0, device=d)
        self.z = torch.empty(paths, assets, device=d)
        try:
            self.ledger = Ledger(os.path.dirname(os.path.abspath(__file__)))
        except OSError:
            self.ledger = Ledger(None)
        stage.at_end(self.ledger.close)

    def paths(self):
        s = self.spot.expand_as(self.z)
        for _ in range(self.dates):
            self.z.normal_()
            s = s * torch.exp(0.01 * (self.z @ self.root.T) - 0.00005)
        return s

    def bump(self, n):
        """Sensitivities; the correlated draw is the same for every bump."""
        rho = self.z
        for _ in range(n):
            rho = self.z @ self.root.T
        return rho

    def quote(self):
        s = self.paths()
        self.bump(self.stage.times("a"))
        pay = (s.mean(1) - 100.0).clamp(min=0)
        price = pay.mean().item()
        self.ledger.post(price, self.stage.times("b"))
        return price


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("device_compute", "Desk.bump", kit.PAIR, start=6, least=0.05, alt="Desk.quote"),
        "b": kit.Part("io", "Ledger.post", kit.PAIR, start=1.0, least=0.005),
    }, "the same product is computed again and again; every quote's page is synced to disk", window=0.7)
    desk = Desk(stage,
                stage.pick(8192, 12288, 16384) if not stage.smoke else 128,
                stage.pick(768, 1024) if not stage.smoke else 16,
                stage.pick(8, 10, 12) if not stage.smoke else 3)
    running = True
    while running:
        desk.quote()
        running = stage.tick()
    stage.leave()
