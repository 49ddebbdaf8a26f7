# SPDX-License-Identifier: Apache-2.0
"""Image denoising by diffusion, with a contact sheet now and then."""
import io
import numpy as np, torch
from PIL import Image, ImageFilter
from rig import Kit, DEV


class Denoiser(torch.nn.Module):
    def __init__(self, w, depth):
        super().__init__()
        self.inp = torch.nn.Conv2d(3, w, 3, 1, 1)
        self.mid = torch.nn.ModuleList([torch.nn.Conv2d(w, w, 3, 1, 1) for _ in range(depth)])
        self.out = torch.nn.Conv2d(w, 3, 3, 1, 1)

    def forward(self, x):
        h = self.inp(x)
        for m in self.mid:
            h = h + torch.nn.functional.silu(m(h))
        return self.out(h)


def sheet(a):
    """a small file from one picture"""
    im = Image.fromarray(a).resize((96, 96), Image.BICUBIC).filter(ImageFilter.GaussianBlur(1.5))
    buf = io.BytesIO()
    im.save(buf, "PNG")
    return buf.getvalue()


@torch.no_grad()
def main(kit):
    side, bs = kit.n(64, 8), kit.n(kit.rng.choice([32, 64]), 2)
    net = Denoiser(kit.n(192, 8), kit.n(8, 1)).to(DEV)
    x = torch.randn(bs, 3, side, side, device=DEV)
    base, _ = kit.measure(lambda: x.sub_(net(x), alpha=0.001))
    one = kit.unit(lambda: sheet(np.zeros((side, side, 3), np.uint8) + 9), 20)
    every, s = kit.rng.choice([10, 20, 30]), kit.share(0.24)
    count = max(1, round(every * base * s / (1 - s) / one))
    kit.cause("host_code", kit.place(sheet, "Image.fromarray"), "every %d steps Pillow makes %d pictures on the launching thread" % (every, count))
    for it in kit.steps():
        eps = net(x)
        x = (x - 0.02 * eps) / (x.std() + 1e-3)
        if kit.on and it % every == every - 1:
            a = (x.clamp(-1, 1) * 127 + 128).byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
            for j in range(count):
                sheet(a[j % bs])


if __name__ == "__main__":
    main(Kit(__file__))
