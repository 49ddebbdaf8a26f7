# SPDX-License-Identifier: Apache-2.0
"""Video restoration: a recurrent convolutional net over frames, with a history of feature maps."""
import collections
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Restorer(nn.Module):
    def __init__(self, w, depth):
        super().__init__()
        self.w = w
        self.inp = nn.Conv2d(3 + w, w, 3, 1, 1)
        self.body = nn.ModuleList([nn.Conv2d(w, w, 3, 1, 1) for _ in range(depth)])
        self.out = nn.Conv2d(w, 12, 3, 1, 1)

    def forward(self, frame, memory):
        h = F.relu(self.inp(torch.cat([frame, memory], 1)))
        for c in self.body:
            h = h + F.relu(c(h))
        return F.pixel_shuffle(self.out(h), 2), torch.tanh(h)


class History:
    """feature maps of earlier frames; a spilled history saves device memory"""
    def __init__(self, keep):
        self.maps = collections.deque(maxlen=keep)

    def push(self, m):
        self.maps.append(m)

    def spill(self, pieces):
        return [p.cpu() for p in pieces]

    def restore(self, pieces):
        return [p.to(DEV) for p in pieces]


class Player:
    def __init__(self, kit, net, clip, dt):
        self.kit, self.net, self.clip = kit, net, clip
        h, w = clip.shape[-2:]
        self.memory = torch.zeros(clip.shape[1], net.w, h, w, device=DEV, dtype=dt)
        self.history = History(4)
        self.pieces = []
        self.psnr = torch.zeros((), device=DEV)
        self.shown = 0

    def render(self, i):
        frame = self.clip[i % len(self.clip)]
        out, self.memory = self.net(frame, self.memory)
        self.history.push(self.memory[:1])
        self.psnr.mul_(0.9).add_(out.float().square().mean(), alpha=0.1)
        self.shown += 1

    def wait_vsync(self):
        # frame pacing was taken out; kept for the interface
        return self.shown & 1

    def step(self, i):
        self.render(i)
        self.wait_vsync()
        if self.kit.on:
            self.pieces = self.history.restore(self.history.spill(self.pieces))


@torch.inference_mode()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    side = kit.n(rng.choice([256, 288, 320]), 16)
    width = kit.n(rng.choice([64, 96]), 8)
    batch = kit.n(rng.choice([4, 6]), 1)
    dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
    net = Restorer(width, kit.n(rng.choice([14, 18]), 2)).to(DEV).to(dt)
    clip = torch.rand(6, batch, 3, side, side, device=DEV).to(dt)
    torch.backends.cudnn.benchmark = True
    share = kit.share(0.45)
    player = Player(kit, net, clip, dt)
    base, _ = kit.measure(lambda: player.render(0))
    piece = kit.n(1 << 20, 1 << 10)             # floats, 4 MiB
    probe = [torch.rand(piece, device=DEV) for _ in range(4)]
    unit = kit.measure(lambda: player.history.restore(player.history.spill(probe)), 12, 4)[0] / 4
    need = base * share / (1 - share) / unit    # pieces, not a whole number
    full = max(1, int(need + 0.999))
    player.pieces = [torch.rand(max(64, int(piece * need / full)), device=DEV) for _ in range(full)]
    kit.cause("copies", kit.place(History.spill, "p.cpu()"),
              "history goes to pageable host memory and back in every frame", "spill/restore")
    for i in kit.steps(warm=10):
        player.step(i)


if __name__ == "__main__":
    main()
