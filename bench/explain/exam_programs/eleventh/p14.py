# SPDX-License-Identifier: Apache-2.0
"""Volume segmentation: the next volume travels on a side stream while the present one is computed."""
import stage
import torch
from torch import nn


class Feeder:
    """Two device slots; a volume arrives in slices and every slice has an event."""

    def __init__(self, dev, slices, shape):
        self.dev, self.fast = dev, dev == "cuda"
        self.host = torch.zeros(shape, dtype=torch.float16)
        if self.fast:
            self.host = self.host.pin_memory()
            self.side = torch.cuda.Stream()
        self.slots = [torch.zeros((slices,) + shape, dtype=torch.float16, device=dev) for _ in range(2)]
        self.slices = slices
        self.marks = [[], []]
        self.used = [None, None]
        self.turn = 0
        self.need = 0.0

    def begin_next(self):
        k = (self.turn + 1) % 2
        if not self.fast:
            for i in range(self.slices):
                self.slots[k][i].copy_(self.host)
            return
        self.marks[k] = []
        with torch.cuda.stream(self.side):
            if self.used[k] is not None:
                self.side.wait_event(self.used[k])
            for i in range(self.slices):
                self.slots[k][i].copy_(self.host, non_blocking=True)
                e = torch.cuda.Event()
                e.record(self.side)
                self.marks[k].append(e)

    def current(self):
        k = self.turn % 2
        if self.fast:
            main = torch.cuda.current_stream()
            if self.marks[k]:
                main.wait_event(self.marks[k][-1])
            ahead = self.marks[1 - k][:int(self.need)]
            if ahead:
                main.wait_event(ahead[-1])
        return self.slots[k]

    def release(self):
        if self.fast:
            e = torch.cuda.Event()
            e.record()
            self.used[self.turn % 2] = e
        self.turn += 1

    def set_need(self, x):
        self.need = min(x, self.slices)


class Segmenter:
    def __init__(self, opts):
        s = opts.smoke
        d = 32 if s else 4096
        self.rows = 8 if s else 4096
        dt = torch.float32 if s else torch.float16
        with torch.device(opts.device):
            net = nn.Sequential(*[m for _ in range(2 if s else 40) for m in (nn.Linear(d, d), nn.ReLU())])
        self.net = net.to(dt)
        self.d, self.dt = d, dt
        shape = (8, d) if s else (1024, 4096)
        self.feeder = Feeder(opts.device, 4 if s else self.fit(shape), shape)

    def compute(self, volume):
        x = volume.view(-1, self.d)[:self.rows].to(self.dt)
        return self.net(x).mean()

    @torch.inference_mode()
    def fit(self, shape):
        """As many slices as travel comfortably during the computation."""
        x = torch.zeros(self.rows, self.d, device="cuda", dtype=self.dt)
        h = torch.zeros(shape, dtype=torch.float16).pin_memory()
        g = torch.empty(shape, dtype=torch.float16, device="cuda")
        times = []
        for job in (lambda: self.net(x), lambda: g.copy_(h, non_blocking=True)):
            for _ in range(20):
                job()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(20):
                job()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
        return max(8, int(0.75 * times[0] / times[1]))

    @torch.inference_mode()
    def step(self):
        self.feeder.begin_next()
        volume = self.feeder.current()
        out = self.compute(volume)
        self.feeder.release()
        return out.item()


def main():
    opts = stage.options()
    job = Segmenter(opts)
    stage.conduct(opts, job.step, [
        stage.Factor("stream_dependency", "Feeder.current", "Feeder.begin_next", job.feeder.set_need, 3.0,
                     job.feeder.slices),
    ], "middle")


if __name__ == "__main__":
    main()
