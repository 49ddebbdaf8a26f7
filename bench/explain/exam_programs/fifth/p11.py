# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""CTC speech recogniser training on raw waveforms (spectrogram on the device, conv + attention encoder)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class WaveCourier:
    """Brings utterances of the host to the device."""

    def __init__(self, o, batch, samples, slots=2):
        self.dev = o.device
        g = torch.Generator().manual_seed(o.seed)
        self.plain = [torch.randn(batch, samples, generator=g) for _ in range(slots)]
        self.staged = [p.pin_memory() if o.gpu else p.clone() for p in self.plain]
        self.room = torch.empty(batch, samples, device=o.device)
        self.split, self.turn = 0, 0

    def upload(self):
        k = self.turn % len(self.plain)
        self.turn += 1
        s = self.split
        if s > 0:
            for r in range(s):
                self.room[r].copy_(self.plain[k][r])
        if s < len(self.room):
            self.room[s:].copy_(self.staged[k][s:], non_blocking=True)
        return self.room


class Subsample(nn.Module):
    def __init__(self, bins, d):
        super().__init__()
        self.c1 = nn.Conv1d(bins, d, 5, stride=2, padding=2)
        self.c2 = nn.Conv1d(d, d, 5, stride=2, padding=2)

    def forward(self, s):
        return F.gelu(self.c2(F.gelu(self.c1(s)))).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.ln = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.dw = nn.Conv1d(d, d, 15, padding=7, groups=d)
        self.ff1, self.ff2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln[0](x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        x = x + self.dw(self.ln[1](x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff2(F.silu(self.ff1(self.ln[2](x))))


class Recogniser(nn.Module):
    def __init__(self, nfft, d, heads, layers, vocab):
        super().__init__()
        self.nfft = nfft
        self.register_buffer("win", torch.hann_window(nfft))
        self.sub = Subsample(nfft // 2 + 1, d)
        self.layers = nn.ModuleList(EncoderLayer(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def spectrum(self, wave):
        with torch.no_grad():
            z = torch.stft(wave, self.nfft, hop_length=self.nfft // 2, window=self.win, return_complex=True)
            return torch.log1p(z.abs())

    def forward(self, wave):
        x = self.sub(self.spectrum(wave))
        for ly in self.layers:
            x = ly(x)
        return self.head(x)


def main():
    o = bk.options()
    share = o.rng.uniform(0.14, 0.20)
    batch, samples, nfft, d, heads, layers = (4, 4000, 128, 32, 2, 1) if o.smoke else \
        (o.rng.choice([56, 64, 72]), 320_000, 512, 512, 8, 3)
    courier = WaveCourier(o, batch, samples)
    net = Recogniser(nfft, d, heads, layers, 128).to(o.device)
    optim = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=o.gpu)
    label = None
    pacer = bk.Pacer(o.device)

    def allocate_and_train():
        nonlocal label
        wave = courier.upload()
        with torch.autocast(o.device.type, dtype=torch.bfloat16):
            y = net(wave)
        if label is None:
            label = torch.randint(0, 128, y.shape[:2], device=o.device)
        loss = F.cross_entropy(y.flatten(0, 1).float(), label.flatten())
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()
        pacer.tick()

    bk.mean_step(allocate_and_train, 0.1 if o.smoke else 0.8, o.device)
    base = bk.mean_step(allocate_and_train, o.probe, o.device)

    def measure(k):
        courier.split = k
        return bk.mean_step(allocate_and_train, o.probe, o.device)

    k = bk.tune(measure, base, share, batch // 2, batch)
    on, off = bk.two_phases(allocate_and_train, o, lambda: setattr(courier, "split", k),
                            lambda: setattr(courier, "split", 0))
    bk.truth(on, off, "copies", "WaveCourier.upload",
             f"{k} of {batch} utterances ({samples * 4} bytes each) copied from pageable memory, the rest pinned")


if __name__ == "__main__":
    main()
