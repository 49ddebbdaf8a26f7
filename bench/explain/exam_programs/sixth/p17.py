# SPDX-License-Identifier: Apache-2.0
"""Keyword spotting: clips from a loader with two workers, a residual network over mel-like features."""
import multiprocessing as mp
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
import exam_kit as kit

job = kit.Job("p17")
BATCH = job.size([64, 80, 96], 4)
SAMPLES = job.size(8000, 400)
CH = job.size([96, 128, 160], 8)
DEPTH = job.size([8, 10], 2)


class ClipStream(IterableDataset):
    def __init__(self):
        self.echoes = mp.Value("d", 0.0, lock=False)
        rng = np.random.default_rng(job.seed)
        self.clips = rng.standard_normal((2 * BATCH, SAMPLES), dtype=np.float32)
        self.room = rng.standard_normal(SAMPLES // 4, dtype=np.float32)

    def denoise_on_gpu(self, clip, taps):
        n = 2 * SAMPLES
        spec = np.fft.rfft(clip, n) * np.fft.rfft(self.room * taps, n)
        wet = np.fft.irfft(spec, n)[:SAMPLES].astype(np.float32)
        return 0.95 * clip + 0.05 * wet / (np.abs(wet).max() + 1e-6)

    def __iter__(self):
        k, acc = 0, 0.0
        while True:
            at = (k * 7) % BATCH
            k += 1
            x = self.clips[at:at + BATCH].copy()
            acc += self.echoes.value
            for i in range(int(acc)):
                x[i % BATCH] = self.denoise_on_gpu(x[i % BATCH], 1.0 + 0.01 * i)
            acc -= int(acc)
            yield torch.from_numpy(x)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(1, CH, 64, stride=8, padding=28)
        self.body = nn.ModuleList(nn.Conv1d(CH, CH, 9, padding=4) for _ in range(DEPTH))
        self.norm = nn.ModuleList(nn.BatchNorm1d(CH) for _ in range(DEPTH))
        self.head = nn.Linear(CH, 35)

    def forward(self, x):
        x = self.front(x[:, None])
        for c, n in zip(self.body, self.norm):
            x = x + F.relu(n(c(x)))
        return self.head(x.mean(2))


def worker_setup(_):
    kit.die_with_parent()
    torch.set_num_threads(1)


class KeywordTrainer:
    def __init__(self):
        self.data = ClipStream()
        self.loader = DataLoader(self.data, batch_size=None, num_workers=2, prefetch_factor=2, worker_init_fn=worker_setup)
        self.it = iter(self.loader)
        self.net = Spotter().to(job.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.y = torch.randint(0, 35, (BATCH,), device=job.dev)

    def compute_heavy_part(self):
        x = next(self.it)
        return x.to(job.dev)

    def train_step(self):
        x = self.compute_heavy_part()
        for part in range(2):
            loss = F.cross_entropy(self.net(x), self.y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()

    def close(self):
        it, self.it = self.it, None
        it._shutdown_workers()


def main():
    t = KeywordTrainer()
    kit.on_close(t.close)

    def echoes(n, on):
        t.data.echoes.value = n if on else 0.0
    c = kit.Cause("input_pipeline", "ClipStream.denoise_on_gpu", echoes, job.share(0.43, 0.55), job.size(40, 2), 1, 20000)
    kit.examine(job, [c], "the loader's two workers add room echoes clip by clip in NumPy and cannot keep up; the trainer waits "
                "in next() of KeywordTrainer.compute_heavy_part", step=t.train_step, window=0.7)


if __name__ == "__main__":
    main()
