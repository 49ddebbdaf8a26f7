# SPDX-License-Identifier: Apache-2.0
"""Speech-command training on log-mel features, with room responses streamed in beside the clips."""
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Mel(nn.Module):
    def __init__(self, n_fft, bands):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("bank", torch.rand(n_fft // 2 + 1, bands) / n_fft)

    def forward(self, wave):
        spec = torch.stft(wave, self.n_fft, self.n_fft // 4, window=self.window, return_complex=True).abs()
        return torch.log1p(spec.transpose(1, 2) @ self.bank)


class Tagger(nn.Module):
    def __init__(self, bands, d, depth, classes):
        super().__init__()
        self.inp = nn.Linear(bands, d)
        layer = lambda: nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.body = nn.ModuleList(layer() for _ in range(depth))
        self.out = nn.Linear(d, classes)

    def forward(self, mel):
        h = self.inp(mel)
        for f in self.body:
            h = h + f(h)
        return self.out(h.mean(1))


class RoomBank:
    """Impulse responses recorded in many rooms, too many to live on the device."""

    def __init__(self, samples, dev):
        self.data = torch.rand(1 << 16).repeat(samples >> 16)
        self.dev, self.take, self.pos = dev, 0, 0

    def draw(self):
        if not self.take:
            return 0.0
        room = self.data[: self.take].to(self.dev)
        self.pos += 1
        return room[:: max(1, self.take // 512)].mean()


def main():
    st = stage.Stage()
    dev = st.device
    batch, length = st.pick(256, 4), st.pick(32000, 2000)
    mel = Mel(st.pick(1024, 128), 80).to(dev)
    net = Tagger(80, st.pick(1024, 32), st.pick(5, 2), 35).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=not st.smoke)
    clips = torch.randn(4, batch, length)
    labels = torch.randint(0, 35, (4, batch))
    if not st.smoke:
        clips, labels = clips.pin_memory(), labels.pin_memory()
    rooms = RoomBank(st.pick(80 << 20, 1 << 21), dev)
    stage.background(lambda: [time.sleep(1.0) for _ in iter(int, 1)], "decode-worker-gil")
    turn_no = [0]

    def fit_batch():
        turn_no[0] += 1
        i = turn_no[0] % 4
        wave = clips[i].to(dev, non_blocking=True)
        y = labels[i].to(dev, non_blocking=True)
        wave = wave + 1e-3 * rooms.draw()
        with torch.no_grad():
            feats = mel(wave)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = net(feats)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    def turn(a):
        rooms.take = int(a)

    knob = stage.Knob("copies", "RoomBank.draw", turn, st.pick(6 << 20, 200_000), "middle", alt="main.fit_batch",
                      top=st.pick(80 << 20, 1 << 21))
    st.perform(fit_batch, [knob])


if __name__ == "__main__":
    main()
