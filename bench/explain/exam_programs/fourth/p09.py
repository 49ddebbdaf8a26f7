# SPDX-License-Identifier: Apache-2.0
"""Panorama video stitching: convolutional blending on the main stream, exposure statistics on a second one."""
import torch
import torch.nn.functional as F
from rig import Job


class Exposure:
    """Running per-channel light curves; four long rows, so only a few SMs are busy."""

    def __init__(self, job):
        self.job = job
        self.rows = torch.rand(4, 20_000_000 if job.cuda else 4000, device=job.dev)
        self.len = 0
        self.curve = None

    def update(self):
        if self.len > 16:
            self.curve = torch.cumsum(self.rows[:, :self.len], 1)[:, -1]


class Stitcher:
    def __init__(self, job):
        self.job = job
        c = job.pick(128, 160, 192, tiny=4)
        self.h = job.pick(270, 360, tiny=16)
        self.frame = torch.randn(2, c, self.h, self.h * 16 // 9, device=job.dev, dtype=job.half)
        self.frame = self.frame.to(memory_format=torch.channels_last)
        self.w = [(torch.randn(c, c, 3, 3, device=job.dev, dtype=job.half) / c / 3).to(memory_format=torch.channels_last)
                  for _ in range(3)]
        self.reps = 1
        self.exp = Exposure(job)
        self.side = torch.cuda.Stream() if job.cuda else None
        self.strict = True
        self.last = None

    def blend(self, x):
        for _ in range(self.reps):
            for w in self.w:
                x = F.relu(F.conv2d(x, w, padding=1)) + 0.1 * x
        return x

    def measure_light(self):
        if self.side is None:
            self.exp.update()
            return
        with torch.cuda.stream(self.side):
            self.exp.update()
            self.last = torch.cuda.Event()
            self.last.record()

    def hand_over(self):
        # the frame may only leave once the light curve is there
        if self.side is not None and self.strict and self.last is not None:
            torch.cuda.current_stream().wait_event(self.last)

    def measure_order(self):
        if self.side is not None and self.strict:
            self.side.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def frame_done(self):
        y = self.blend(self.frame)
        self.measure_order()
        self.measure_light()
        self.hand_over()
        self.result = y.mean()
        self.job.pace(2)


def launch_all(s):
    s.frame_done()


def main():
    job = Job(0.22, 0.42)
    st = Stitcher(job)
    step = lambda: launch_all(st)
    job.size(step, lambda n: setattr(st, "reps", n), 2, job.rng.uniform(6, 14), 200)

    def setk(k):
        st.exp.len = int(k)
        st.strict = k > 0

    job.tune(step, setk, 500_000, st.exp.rows.shape[1])

    def off():
        st.strict = False     # same statistics, but nobody waits for them

    job.show(step, off, [("stream_dependency", "Stitcher.hand_over")])


if __name__ == "__main__":
    main()
