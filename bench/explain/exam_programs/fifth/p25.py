# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Weather emulator rollout (Fourier mixing + channel MLP): four forecast steps per CUDA-graph replay."""
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class FourierMix(nn.Module):
    def __init__(self, c, h, w, modes):
        super().__init__()
        self.m = modes
        self.weight = nn.Parameter(torch.randn(c, modes, modes, 2) * 0.02)

    def forward(self, x):
        z = torch.fft.rfft2(x, norm="ortho")
        f = torch.zeros_like(z)
        f[..., : self.m, : self.m] = z[..., : self.m, : self.m] * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(f, s=x.shape[-2:], norm="ortho")


class EmulatorBlock(nn.Module):
    def __init__(self, c, h, w, modes):
        super().__init__()
        self.mix = FourierMix(c, h, w, modes)
        self.up, self.down = nn.Conv2d(c, 4 * c, 1), nn.Conv2d(4 * c, c, 1)

    def forward(self, x):
        y = self.mix(x)
        return x + 0.1 * self.down(F.gelu(self.up(y)))


class Emulator(nn.Module):
    def __init__(self, c, h, w, depth, modes):
        super().__init__()
        self.blocks = nn.Sequential(*[EmulatorBlock(c, h, w, modes) for _ in range(depth)])

    def forward(self, s):
        return torch.tanh(self.blocks(s))


class Rollout:
    def __init__(self, o):
        c, h, w, depth, modes = (8, 16, 32, 1, 6) if o.smoke else (192, 256, 512, 3, o.rng.choice([48, 64, 80]))
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        self.o = o
        self.net = Emulator(c, h, w, depth, modes).to(o.device).eval()
        self.state = torch.randn(2, c, h, w, device=o.device)
        self.graph = None
        self.pacer = bk.Pacer(o.device)
        with torch.no_grad():
            if o.gpu:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self.four_steps()
                torch.cuda.current_stream().wait_stream(side)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.four_steps()

    def four_steps(self):
        s = self.state
        for _ in range(4):
            s = self.net(s)
        self.state.copy_(s)

    def recompile_check(self):
        """Shape guard; always true here."""
        return self.state.shape[0] == 2

    @torch.no_grad()
    def forecast(self):
        if not self.recompile_check():
            raise RuntimeError("state changed")
        if self.graph is not None:
            self.graph.replay()
        else:
            self.four_steps()
        self.pacer.tick()


def main():
    o = bk.options()
    r = Rollout(o)
    evt = threading.Event()
    threading.Thread(target=evt.wait, name="fsync-daemon", daemon=True).start()
    bk.mean_step(r.forecast, 0.2 if o.smoke else 1.0, o.device)
    on, off = bk.two_phases(r.forecast, o, lambda: None, lambda: None)
    evt.set()
    bk.truth(on, off, "healthy", "", "graph replay, device-bound; both phases are the same work")


if __name__ == "__main__":
    main()
