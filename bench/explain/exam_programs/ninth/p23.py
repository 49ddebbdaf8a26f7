# SPDX-License-Identifier: Apache-2.0
"""Robot localisation: a particle filter with range measurements to beacons and a landmark refinement."""
import kit
import math
import torch


def make_filter(stage, count, beacons):
    dev = stage.device
    pose = torch.rand(count, 3, device=dev) * torch.tensor([50.0, 50.0, 2 * math.pi], device=dev)
    marks = torch.rand(beacons, 2, device=dev) * 50.0
    truth = torch.tensor([25.0, 25.0, 0.3], device=dev)
    fine = [torch.rand(2, device=dev) * 50.0 for _ in range(64)]

    def move(p, speed, turn):
        heading = p[:, 2] + turn + 0.02 * torch.randn_like(p[:, 2])
        step = speed + 0.05 * torch.randn_like(heading)
        return torch.stack([p[:, 0] + step * heading.cos(), p[:, 1] + step * heading.sin(), heading], 1)

    def weigh(p, ranges):
        d = torch.cdist(p[:, :2], marks)
        return torch.softmax(-((d - ranges) ** 2).sum(1) * 0.5, 0)

    def resample(p, w):
        at = torch.rand(len(p), device=dev)
        index = torch.searchsorted(w.cumsum(0), at).clamp(max=len(p) - 1)
        return p[index]

    def refine(estimate, rounds):
        """Each landmark pulls the estimate a little."""
        for k in range(rounds):
            mark = fine[k % len(fine)]
            gap = mark - estimate[:2]
            reach = gap.norm()
            pull = gap / (reach + 1.0)
            estimate[:2] += 1e-4 * pull
        return estimate

    def cycle(i):
        nonlocal pose, truth
        pose = move(pose, 0.2, 0.01)
        truth = move(truth[None], 0.2, 0.01)[0]
        ranges = torch.cdist(truth[None, :2], marks)[0]
        w = weigh(pose, ranges)
        mean = (w[:, None] * pose).sum(0)
        pose = resample(pose, w)
        x, y, _ = mean.tolist()
        mean = refine(mean, stage.times("a"))
        return x, y, mean[:2].sum().item()

    return cycle


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("launch_overhead", "refine", kit.HEAVY, start=60, tiny=10, least=1, alt="cycle"),
    }, "landmarks are visited one by one with tiny kernels")
    cycle = make_filter(stage,
                        stage.pick(1_000_000, 1_500_000, 2_000_000) if not stage.smoke else 500,
                        stage.pick(32, 48) if not stage.smoke else 8)
    path, i = [], 0
    while True:
        path.append(cycle(i))
        i += 1
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
