# SPDX-License-Identifier: Apache-2.0
"""Long context generation; old cache pages are parked in main memory between turns."""
import threading
import time

import stage
import torch
from torch.nn import functional as F


class PagedCache:
    def __init__(self, pages, page, device, dtype):
        self.pages = torch.randn(pages, page, device=device, dtype=dtype)
        self.parked = torch.zeros(pages // 8, page, dtype=dtype)
        self.flat_dev, self.flat_host = self.pages.view(-1), self.parked.view(-1)
        self.cold = 0

    def park(self):
        n = min(self.cold, self.flat_host.numel())
        if n:
            self.flat_host[:n].copy_(self.flat_dev[:n])

    def recall(self):
        n = min(self.cold, self.flat_host.numel()) // 4
        if n:
            self.flat_dev[:n].copy_(self.flat_host[:n])

    def set_cold(self, x):
        self.cold = int(x)


class Writer:
    def __init__(self, opts):
        s = opts.smoke
        self.b, self.h, self.t, self.e, self.n = (1, 2, 16, 8, 2) if s else (16, 16, 2048, 128, 8)
        dt = torch.float32 if s else torch.bfloat16
        d = self.h * self.e
        kw = {"device": opts.device, "dtype": dt}
        self.cache = PagedCache(64, self.b * self.h * self.t * self.e * 2 // 64 * self.n, opts.device, dt)
        self.w = [torch.randn(d, d, **kw) * d ** -0.5 for _ in range(self.n)]
        self.x = torch.randn(self.b, 64 if not s else 2, d, **kw)
        self.d = d

    def attend(self, i, x):
        kv = self.cache.pages.view(self.n, 2, self.b, self.h, self.t, self.e)[i]
        q = (x @ self.w[i]).view(self.b, -1, self.h, self.e).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, kv[0], kv[1])
        return F.layer_norm(x + a.transpose(1, 2).reshape(x.shape), (self.d,))

    @torch.inference_mode()
    def turn(self):
        x = self.x
        for _ in range(4):
            for i in range(self.n):
                x = self.attend(i, x)
        mark = x[:, -1, 0].float().sum().item()
        self.cache.park()
        self.cache.recall()
        return mark


def stream_sync():
    n = 0
    while True:
        time.sleep(0.008)
        n += sum(range(50))


def main():
    opts = stage.options()
    w = Writer(opts)
    threading.Thread(target=stream_sync, name="stream-sync", daemon=True).start()
    stage.conduct(opts, w.turn, [
        stage.Factor("copies", "PagedCache.park", "PagedCache.recall", w.cache.set_cold, 2e6, float(w.cache.flat_host.numel())),
    ], "heavy")


if __name__ == "__main__":
    main()
