# SPDX-License-Identifier: Apache-2.0
"""Image classification with loader processes that crop, flip and soften on the fly."""
import multiprocessing as mp
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stage


class Crops(IterableDataset):
    def __init__(self, batch, side, seed, strength):
        self.batch, self.side, self.seed, self.strength = batch, side, seed, strength

    def _soften(self, img, rows):
        """Horizontal three-tap filter over a number of image rows, wrapping round when there are more."""
        flat = img.reshape(-1, img.shape[-1])
        block = 256
        for start in range(0, rows, block):
            at = start % max(1, len(flat) - block)
            part = flat[at:at + min(block, rows - start)].astype(np.float32)
            part[:, 1:-1] = 0.25 * part[:, :-2] + 0.5 * part[:, 1:-1] + 0.25 * part[:, 2:]
            flat[at:at + len(part)] = np.clip(part, 0, 255)
        return img

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(self.seed + info.id)
        big = rng.integers(0, 255, (self.batch, 3, self.side + 16, self.side + 16), dtype=np.uint8)
        while True:
            y, x = rng.integers(0, 16, 2)
            img = big[:, :, y:y + self.side, x:x + self.side].copy()
            if rng.random() < 0.5:
                img = img[..., ::-1].copy()
            img = self._soften(img, int(self.strength.value))
            yield torch.from_numpy(img), torch.from_numpy(rng.integers(0, 100, self.batch))


class Net(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 4, stride=4)
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU())
                                  for _ in range(depth))
        self.head = nn.Linear(ch, 100)

    def forward(self, x):
        h = self.stem(x)
        for f in self.body:
            h = h + f(h)
        return self.head(h.mean((2, 3)))


def main():
    st = stage.Stage()
    dev = st.device
    strength = mp.get_context("fork").Value("d", 0.0, lock=False)
    data = Crops(st.pick(128, 8), st.pick(96, 32), st.seed, strength)
    loader = DataLoader(data, batch_size=None, num_workers=st.pick(3, 1), prefetch_factor=2, pin_memory=not st.smoke,
                        worker_init_fn=stage.tether, multiprocessing_context="fork")
    batches = iter(loader)
    net = Net(st.pick(256, 16), st.pick(12, 2)).to(dev).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    stage.background(lambda: [time.sleep(0.3) for _ in iter(int, 1)], "cuda-allocator-trim")
    log = []

    def train_step():
        img, y = next(batches)
        img = img.to(dev, non_blocking=True)
        y = y.to(dev, non_blocking=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            x = (img.to(torch.bfloat16) / 255).contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        log.append(loss.detach())
        if len(log) >= 16:
            float(torch.stack(log).mean().item())
            log.clear()

    def turn(a):
        strength.value = float(a)

    knob = stage.Knob("input_pipeline", "Crops._soften", turn, st.pick(60_000, 3000), "heavy", alt="main.train_step")
    st.perform(train_step, [knob], period=3, settle=14)


if __name__ == "__main__":
    main()
