# SPDX-License-Identifier: Apache-2.0
"""Shelf-product detection: a single-stage detector over large photographs, boxes merged per frame."""
import kit
from collections import namedtuple
import torch
from torch import nn

Box = namedtuple("Box", "x0 y0 x1 y1 score")


def stage_of(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU(inplace=True),
                         nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True),
                         nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True))


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.levels = nn.ModuleList([stage_of(3, c), stage_of(c, 2 * c), stage_of(2 * c, 4 * c)])

    def forward(self, x):
        out = []
        for level in self.levels:
            x = level(x)
            out.append(x)
        return out


class Neck:
    """Arranges feature maps for the heads."""

    def __init__(self, stage, floats):
        self.stage = stage
        self.map = torch.zeros(4, 64, floats // 256, device=stage.device)

    def arrange(self, n):
        m = self.map
        for _ in range(n):
            m = m.clone()
        return m


def overlap(a, b):
    w = min(a.x1, b.x1) - max(a.x0, b.x0)
    h = min(a.y1, b.y1) - max(a.y0, b.y0)
    if w <= 0.0 or h <= 0.0:
        return 0.0
    both = w * h
    return both / ((a.x1 - a.x0) * (a.y1 - a.y0) + (b.x1 - b.x0) * (b.y1 - b.y0) - both)


def merge(boxes, budget):
    kept, done = [], 0
    while done < budget:
        kept.clear()
        for b in boxes:
            worst = 0.0
            for k in kept:
                worst = max(worst, overlap(b, k))
                done += 1
                if done >= budget:
                    return kept
            if worst < 0.999:
                kept.append(b)
        done += 1
    return kept


class Detector:
    def __init__(self, stage, c, side):
        self.stage = stage
        self.net = Backbone(c).to(stage.device).eval()
        self.head = nn.Conv2d(4 * c, 5, 1).to(stage.device)
        self.neck = Neck(stage, 16 << 20 if stage.cuda else 1 << 14)
        self.photo = torch.rand(2, 3, side, side, device=stage.device)

    @torch.inference_mode()
    def look(self):
        with torch.autocast(self.stage.device.type, torch.bfloat16):
            maps = self.net(self.photo)
            self.neck.arrange(self.stage.times("b"))
            y = self.head(maps[-1]).float().flatten(2)
        top = y[:, 4].topk(100, dim=1).indices
        raw = y.gather(2, top[:, None].expand(-1, 5, -1)).permute(0, 2, 1).reshape(-1, 5).tolist()
        return [Box(i, i, i + 30 + abs(r[0]), i + 30 + abs(r[1]), r[4]) for i, r in enumerate(raw)]


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("host_code", "merge", kit.PAIR, start=2000, tiny=300, least=20, alt="overlap"),
        "b": kit.Part("device_memory_bandwidth", "Neck.arrange", kit.PAIR, start=16, tiny=8, least=0.2),
    }, "boxes are merged pair by pair in Python; feature maps are copied on the device for nothing")
    detector = Detector(stage, stage.pick(48, 64) if not stage.smoke else 8, stage.pick(1280, 1536, 1792) if not stage.smoke else 128)
    count = 0
    while True:
        boxes = detector.look()
        count += len(merge(boxes, int(stage.amount("a"))))
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
