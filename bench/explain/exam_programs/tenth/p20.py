# SPDX-License-Identifier: Apache-2.0
"""Satellite images are segmented tile by tile; a guest on a shared device, the job tidies up after itself."""
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class TileNet(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp = nn.Conv2d(4, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv2d(ch, 6, 1)

    def forward(self, x):
        h = self.inp(x)
        for c in self.body:
            h = h + F.gelu(c(h))
        return self.out(h)


class Housekeeper:
    """A good neighbour gives memory back; how often is a matter of manners."""

    def __init__(self, smoke):
        self.smoke, self.manners, self.due = smoke, 0.0, 0.0

    def between_tiles(self):
        self.due += self.manners
        if self.due < 1:
            return False
        self.due -= 1
        if not self.smoke:
            torch.cuda.empty_cache()
        return True


class Mosaic:
    def __init__(self, st, tiles):
        ch = st.pick(192, 8)
        self.net = TileNet(ch, st.pick(7, 2)).to(st.device, torch.bfloat16).to(memory_format=torch.channels_last)
        side = st.pick(384, 16)
        self.scene = torch.randn(tiles, 4, side, side, device=st.device, dtype=torch.bfloat16)
        self.keeper = Housekeeper(st.smoke)
        self.area = torch.zeros(6, device=st.device)

    def sweep(self):
        for tile in self.scene:
            with torch.no_grad():
                x = tile[None].contiguous(memory_format=torch.channels_last)
                mask = self.net(torch.cat([x, x.flip(-1)])).float().softmax(1)
                self.area += mask.mean((0, 2, 3))
            del mask, x
            self.keeper.between_tiles()


def stall_clock(box):
    while True:
        box["t"] = time.monotonic()
        time.sleep(0.02)


def main():
    st = stage.Stage()
    mosaic = Mosaic(st, 10)
    stage.background(stall_clock, "stall-clock", {})

    def turn(a):
        mosaic.keeper.manners = float(a)
        if not a:
            mosaic.keeper.due = 0.0

    knob = stage.Knob("allocator", "Housekeeper.between_tiles", turn, 0.2, "middle", alt="Mosaic.sweep", top=1.0, whole=False)
    st.perform(mosaic.sweep, [knob], window=0.4)


if __name__ == "__main__":
    main()
