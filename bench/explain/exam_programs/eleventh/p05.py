# SPDX-License-Identifier: Apache-2.0
"""Microphone array enhancement: spectra, a mask network, and a beam per frequency."""
import threading
import time

import stage
import torch
from torch import nn


class MaskNet(nn.Module):
    def __init__(self, bins, d):
        super().__init__()
        self.enc = nn.Linear(bins, d)
        self.mix = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.dec = nn.Linear(d, bins)

    def forward(self, mag):
        x = self.enc(mag)
        for m in self.mix:
            x = x + torch.nn.functional.gelu(m(x))
        return self.dec(x).sigmoid()


class Enhancer:
    def __init__(self, opts):
        s = opts.smoke
        self.dev = opts.device
        self.n_fft = 64 if s else 1024
        self.hop = self.n_fft // 4
        self.wave = torch.randn(2 if s else 48, self.n_fft * (8 if s else 160), device=self.dev)
        self.window = torch.hann_window(self.n_fft, device=self.dev)
        self.net = MaskNet(self.n_fft // 2 + 1, 32 if s else 1024).to(self.dev)
        self.corr = torch.randn(16384 if not s else 256, 256 if s else 2048, device=self.dev, dtype=torch.float64) * 0.01
        self.frames = 0

    def whiten(self):
        """Spatial covariance in double precision over the recent frames."""
        if self.frames < 1:
            return None
        rows = min(self.frames, 16 * self.corr.shape[0])
        cov = None
        while rows > 0:
            part = self.corr[:rows]
            c = part.t() @ part
            cov = c if cov is None else cov + c
            rows -= part.shape[0]
        return cov.diagonal().mean()

    def memory_copy(self, mag):
        return mag.clamp(min=1e-5).log()

    @torch.inference_mode()
    def __call__(self):
        spec = torch.stft(self.wave, self.n_fft, self.hop, window=self.window, return_complex=True)
        mag = self.memory_copy(spec.abs().transpose(1, 2))
        scale = self.whiten()
        mask = self.net(mag).transpose(1, 2)
        out = torch.istft(spec * mask, self.n_fft, self.hop, window=self.window)
        if scale is not None:
            out = out * (1.0 + 0.0 * scale.float())
        return out[:, ::4096].cpu()

    def set_frames(self, x):
        self.frames = int(x)


def meter(stop):
    while not stop.is_set():
        time.sleep(0.01)


def main():
    opts = stage.options()
    torch.manual_seed(opts.seed)
    job = Enhancer(opts)
    threading.Thread(target=meter, args=(threading.Event(),), name="disk-writer", daemon=True).start()
    stage.conduct(opts, job, [
        stage.Factor("device_compute", "Enhancer.whiten", "", job.set_frames, 8000.0 if not opts.smoke else 200.0),
    ], "heavy")


if __name__ == "__main__":
    main()
