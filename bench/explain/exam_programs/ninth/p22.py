# SPDX-License-Identifier: Apache-2.0
"""Weather roll-out with a Fourier neural operator: the state is stepped six hours at a time."""
import kit
import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self, c, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(c, c, modes, modes, dtype=torch.cfloat) / c)
        self.local = nn.Conv2d(c, c, 1)

    def forward(self, x):
        m = self.modes
        f = torch.fft.rfft2(x, norm="ortho")
        low = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.weight)
        g = torch.zeros_like(f)
        g[:, :, :m, :m] = low
        return nn.functional.gelu(torch.fft.irfft2(g, s=x.shape[-2:], norm="ortho") + self.local(x))


class Atmosphere:
    """State and its layouts: channels first for the operator, channels last for the archive."""

    def __init__(self, stage, batch, c, h, w):
        self.stage = stage
        self.state = torch.randn(batch, c, h, w, device=stage.device)

    def archive_layout(self, n):
        view = self.state
        for _ in range(n):
            view = view.flip(0)
        return view[..., :1, :1]


@torch.no_grad()
def rollout(stage, layers, air):
    mean, hours = 0.0, 0
    while True:
        x = air.state
        for layer in layers:
            x = layer(x) * 0.98
        corner = air.archive_layout(stage.times("a"))
        air.state = x + 1e-9 * corner.mean()
        hours += 6
        if hours % 240 == 0:
            mean = air.state.mean().item()
        if not stage.tick():
            return mean


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("device_memory_bandwidth", "Atmosphere.archive_layout", kit.MIDDLE, start=8, least=0.1),
    }, "the whole state is copied again and again on the device, only a corner is used")
    if stage.smoke:
        b, c, h, w, depth, modes = 1, 4, 16, 32, 1, 4
    else:
        b, c, h, w, depth, modes = stage.pick(4, 6), stage.pick(32, 40), 512, stage.pick(512, 640), stage.pick(3, 4), 32
    layers = nn.ModuleList([Spectral(c, modes) for _ in range(depth)]).to(stage.device).eval()
    rollout(stage, layers, Atmosphere(stage, b, c, h, w))
    stage.leave()
