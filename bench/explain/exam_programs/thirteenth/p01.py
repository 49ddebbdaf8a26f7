# SPDX-License-Identifier: Apache-2.0
"""Land-cover segmentation: a plain convolutional net trained on satellite tiles cut by loader workers."""
from stage import Cell, Dial, arguments, conduct, loader_dir, tie_to_parent

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TileSet(Dataset):
    def __init__(self, side, amount, seed):
        self.side, self.amount = side, amount
        self.bank = np.random.default_rng(seed).integers(0, 255, (64, side, side, 3), dtype=np.uint8)
        self.window = np.hanning(9).astype(np.float32)
        self.window /= self.window.sum()

    def __len__(self):
        return 50_000_000

    def __getitem__(self, index):
        tile = self.bank[index % 64]
        tile = (tile[:, ::-1] if index & 1 else tile).copy()
        self.cache_lookup(tile)
        return torch.from_numpy(tile)

    def cache_lookup(self, tile):
        for k in range(int(self.amount.get())):
            row = k % self.side
            line = np.convolve(tile[row, :, k % 3], self.window, mode="same")
            tile[row, :, k % 3] = np.clip(line, 0, 255)


class Trainer:
    def __init__(self, device, tiles, batch, width, depth):
        self.device = device
        loader_dir()
        loader = DataLoader(tiles, batch_size=batch, num_workers=1 if device == "cpu" else 3, prefetch_factor=2,
                            pin_memory=device == "cuda", persistent_workers=True, worker_init_fn=tie_to_parent)
        self.stream = iter(loader)
        first = next(self.stream)
        layers, channels = [], 3
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.Conv2d(width, 8, 1))
        self.net = nn.Sequential(*layers).to(device)
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.loss = torch.zeros((), device=device)
        self.last_shape = tuple(first.shape)

    def save_checkpoint(self):
        return next(self.stream)

    def step(self):
        raw = self.save_checkpoint().to(self.device, non_blocking=True)
        image = raw.permute(0, 3, 1, 2).float().div_(255.0)
        target = (raw[..., 0] // 32).long()
        self.optim.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.net(image), target)
        loss.backward()
        self.optim.step()
        self.loss = loss.detach()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    amount = Cell()
    if args.smoke:
        trainer = Trainer(args.device, TileSet(32, amount, args.seed), 2, 8, 2)
    else:
        trainer = Trainer(args.device, TileSet(256, amount, args.seed), 8, 64, 7)
    dial = Dial(300 if not args.smoke else 60, hi=30000, whole=True, listen=amount.set)
    conduct(args, trainer.step, [dial], settle=14, rest=0.1)


if __name__ == "__main__":
    main()
