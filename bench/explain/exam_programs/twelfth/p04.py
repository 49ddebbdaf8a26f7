# SPDX-License-Identifier: Apache-2.0
"""Classification of scan tiles with a residual network."""
import stage
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    """One item is one ready batch of tiles."""

    def __init__(self, batch, side, grain, seed):
        rng = np.random.default_rng(seed)
        self.plates = rng.integers(0, 255, (24, 3, side + 64, side + 64), dtype=np.uint8)
        self.batch, self.side, self.grain, self.seed = batch, side, grain, seed

    def __len__(self):
        return 1_000_000

    def _polish(self, tile):
        soft = tile.astype(np.float32)
        soft = 0.5 * soft + 0.125 * (np.roll(soft, 1, 1) + np.roll(soft, -1, 1) + np.roll(soft, 1, 2) + np.roll(soft, -1, 2))
        return np.clip(soft, 0, 255).astype(np.uint8)

    def __getitem__(self, at):
        rng = np.random.default_rng((self.seed, at))
        out = np.empty((self.batch, 3, self.side, self.side), np.uint8)
        where = rng.integers(0, 63, (self.batch, 2))
        plate = rng.integers(0, len(self.plates), self.batch)
        for k in range(self.batch):
            y, x = where[k]
            out[k] = self.plates[plate[k], :, y:y + self.side, x:x + self.side]
        for k in range(int(self.grain.get())):
            out[k % self.batch] = self._polish(out[k % self.batch])
        return torch.from_numpy(out), torch.from_numpy(plate.astype(np.int64))


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.a, self.na = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.b, self.nb = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x):
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.skip(x))


def network(width, classes=24):
    layers, cin = [nn.Conv2d(3, width, 5, 2, 2), nn.ReLU()], width
    for k, stride in enumerate((1, 1, 2, 1, 2, 1, 2, 1)):
        cout = width * 2 ** (k // 2)
        layers.append(Block(cin, cout, stride))
        cin = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes))


class Averages(threading.Thread):
    """Prints nothing unless somebody asks."""

    def __init__(self):
        super().__init__(name="decode-worker", daemon=True)
        self.asked = threading.Event()
        self.start()

    def run(self):
        while True:
            self.asked.wait()
            self.asked.clear()


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    cell = stage.Cell()
    grain = stage.Dial(30 if tiny else 300, listen=cell.set)
    data = Scans(8 if tiny else 96, 32 if tiny else 128, cell, args.seed)
    feed = iter(DataLoader(data, batch_size=None, shuffle=False, num_workers=2 if tiny else 4, prefetch_factor=2,
                           pin_memory=not tiny, worker_init_fn=stage.tie_to_parent, multiprocessing_context="fork"))
    Averages()
    net = network(8 if tiny else 128).to(dev)
    if not tiny:
        net = net.to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def train_one():
        tiles, marks = next(feed)
        tiles = tiles.to(dev, non_blocking=True).float().div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(dev, torch.bfloat16, enabled=not tiny):
            loss = F.cross_entropy(net(tiles), marks.to(dev, non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    stage.conduct(args, train_one, [grain], settle=14, rest=0.15)


if __name__ == "__main__":
    main()
