# SPDX-License-Identifier: Apache-2.0
"""Keyword spotting: a residual 1-d convolution net over one-second clips, fed by a DataLoader."""
import kit
import multiprocessing as mp
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KNOB = mp.RawValue("d", 0.0)
RATE = 8000


class ClipBank(Dataset):
    """A whole batch per item: clips are synthesised from a small bank of words."""

    def __init__(self, words, batch):
        self.words, self.batch = words, batch
        rng = np.random.default_rng(7)
        self.bank = rng.standard_normal((words, RATE), dtype=np.float32)

    def __len__(self):
        return 1 << 30

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        label = rng.integers(0, self.words, self.batch)
        clips = self.bank[label] * rng.uniform(0.5, 1.5, (self.batch, 1)).astype(np.float32)
        n = int(round(KNOB.value))
        if n > 0:
            clips = self.voice(clips, n, rng)
        return torch.from_numpy(clips), torch.from_numpy(label)

    def voice(self, clips, n, rng):
        freq = np.fft.rfftfreq(RATE)
        for k in range(n):
            row = k % self.batch
            spec = np.fft.rfft(clips[row])
            clips[row] = np.fft.irfft(spec * np.exp(-2j * np.pi * freq * rng.integers(1, 40)), RATE)
        return clips


class Block(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding=2 * dilation, dilation=dilation)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Spotter(nn.Module):
    def __init__(self, width, depth, words):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 16, stride=8, padding=4)
        self.body = nn.Sequential(*[Block(width, 1 + i % 3) for i in range(depth)])
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.body(self.stem(x[:, None])).mean(-1))


def settle_in(worker):
    kit.bond()


def fit_epoch(stage, loader, model, optimizer):
    history = []
    feed = iter(loader)
    while True:
        clips, label = next(feed)
        clips = clips.to(stage.device, non_blocking=True)
        label = label.to(stage.device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(clips), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        KNOB.value = stage.amount("a")
        if not stage.tick():
            return history


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("input_pipeline", "fit_epoch", kit.HEAVY, start=900, tiny=20, alt="ClipBank.voice", least=1),
    }, "the workers' augmentation is slower than the training step: next(loader) waits", settle=16, window=0.9)
    batch = stage.pick(48, 64) if not stage.smoke else 4
    width = stage.pick(192, 256) if not stage.smoke else 16
    depth = stage.pick(8, 10, 12) if not stage.smoke else 2
    data = ClipBank(35, batch)
    loader = DataLoader(data, batch_size=None, num_workers=2 if stage.smoke else 4, prefetch_factor=2,
                        pin_memory=stage.cuda, persistent_workers=True, multiprocessing_context="fork",
                        worker_init_fn=settle_in)
    model = Spotter(width, depth, 35).to(stage.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    fit_epoch(stage, loader, model, optimizer)
    stage.leave()


if __name__ == "__main__":
    main()
