# SPDX-License-Identifier: Apache-2.0
"""Super-resolution of very large scans: tiles go through a wide net in turn."""
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Upscaler(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.head = nn.Conv2d(3, w, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(w, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        return self.tail(self.body(self.head(x)))


class Scanner:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        w = 8 if smoke else rng.choice([96, 128])
        self.t = 16 if smoke else rng.choice([512, 640])
        self.tiles = 4 if smoke else 40
        self.net = Upscaler(w).to(dev)
        self.scan = torch.rand(3, self.t * 2, self.t * 2, device=dev)
        self.out = torch.zeros(3, self.t * 2, self.t * 2, device=dev)
        self.tidy = 0.0
        self.credit = 0.0
        self.causes = [Cause("allocator", "Scanner.quiesce_stream", self.set_tidy, 8.0 if not smoke else 2.0, 0.05, self.tiles)]

    def set_tidy(self, a, on):
        self.tidy = a / self.tiles if on else 0.0
        self.credit = 0.0

    def quiesce_stream(self):
        """Give memory back between tiles, the card is shared with the viewer."""
        if self.dev.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def paint(self, i):
        y = (i * 37) % self.t
        x = (i * 61) % self.t
        tile = self.scan[:, y:y + self.t, x:x + self.t].unsqueeze(0)
        self.out.copy_(self.net(tile)[0])

    def step(self):
        for i in range(self.tiles):
            self.paint(i)
            self.credit += self.tidy
            if self.credit >= 1.0:
                self.credit -= 1.0
                self.quiesce_stream()
        return self.out.mean().item()


if __name__ == "__main__":
    exam_kit.main(Scanner, "low", "empty_cache between tiles: the cached blocks are freed and allocated anew")
