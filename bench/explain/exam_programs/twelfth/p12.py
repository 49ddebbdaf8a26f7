# SPDX-License-Identifier: Apache-2.0
"""Wave propagation with a spectral operator; snapshots and an image condition."""
import stage
import os
import threading
import time

import numpy as np
import torch


class Spectral:
    def __init__(self, dev, batch, side):
        ky = torch.fft.fftfreq(side, device=dev)[:, None]
        kx = torch.fft.rfftfreq(side, device=dev)[None, :]
        self.filter = torch.exp(-4 * (kx.square() + ky.square()))
        self.speed = 1 + 0.1 * torch.rand(side, side, device=dev)

    def apply(self, field):
        return torch.fft.irfft2(torch.fft.rfft2(field) * self.filter, s=field.shape[-2:]) * self.speed


class Recorder:
    """Ring of the last snapshots on disk."""

    def __init__(self, path, slots, blocks):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.block = np.random.default_rng(1).integers(0, 255, 1 << 16, dtype=np.uint8).tobytes()
        self.slots, self.blocks, self.at = slots, blocks, 0

    def keep(self, energy):
        for _ in range(int(self.blocks())):
            os.pwrite(self.fd, self.block, self.at * len(self.block))
            self.at = (self.at + 1) % self.slots
        return energy


class Imaging:
    def __init__(self, dev, size, traces):
        self.forward = torch.randn(size, size, device=dev)
        self.back = torch.randn(512 if size < 1000 else 8192, size, device=dev)
        self.image = torch.zeros(size, device=dev)
        self.traces = traces

    def correlate(self):
        rows = int(self.traces() * (4 if len(self.back) < 1000 else 32))
        while rows > 0:
            part = self.back[:rows]
            self.image.add_((part @ self.forward).mean(0), alpha=1e-3)
            rows -= len(part)


def march(args, blocks, traces):
    tiny, dev = args.smoke, args.device
    side, batch, subs = (64, 4, 2) if tiny else (512, 256, 4)
    wave = Spectral(dev, batch, side)
    disk = Recorder(os.path.join(stage.scratch_dir(), "ring.bin"), 64 if tiny else 512, blocks)
    image = Imaging(dev, 128 if tiny else 4096, traces)
    now = torch.randn(batch, side, side, device=dev)
    old = torch.zeros_like(now)
    while True:
        for _ in range(subs):
            now, old = torch.lerp(wave.apply(now), old, 0.02), now
        image.correlate()
        energy = now.square().mean().item()
        yield disk.keep(energy)


def progress_thread():
    while True:
        time.sleep(0.06)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    threading.Thread(target=progress_thread, name="prefetcher", daemon=True).start()
    blocks, traces = stage.Dial(10 if args.smoke else 100), stage.Dial(10 if args.smoke else 60)
    with torch.inference_mode():
        waves = march(args, blocks, traces)
        stage.conduct(args, lambda: next(waves), [blocks, traces])


if __name__ == "__main__":
    main()
