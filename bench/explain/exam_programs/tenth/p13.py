# SPDX-License-Identifier: Apache-2.0
"""Distillation: a slow recurrent teacher scores the next batch beside the student's work on this one."""
import time

import torch
from torch import nn

import stage


class Teacher:
    """A recurrent scorer; several unrolled steps make one captured chunk."""

    def __init__(self, st, d, chunk):
        self.w = torch.randn(d, d, device=st.device) / d ** 0.5
        self.h = torch.randn(8, d, device=st.device)
        self.chunk = chunk
        self.replay, _ = st.graph(self.unroll)

    def unroll(self):
        h = self.h
        for _ in range(self.chunk):
            h = torch.tanh(h @ self.w)
        self.h.copy_(h)
        return self.h

    def score(self, chunks):
        for _ in range(chunks):
            self.replay()


class Student(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
                                  for _ in range(depth))

    def forward(self, x):
        for f in self.body:
            x = x + f(x)
        return x


class Pipeline:
    def __init__(self, st, teacher, student, opt, x):
        self.st, self.teacher, self.student, self.opt, self.x = st, teacher, student, opt, x
        self.chunks, self.strict = 1, False
        self.side = None if st.smoke else torch.cuda.Stream(priority=-1)
        self.ready = None if st.smoke else torch.cuda.Event()

    def look_ahead(self):
        """Starts the scores that the next batch will need."""
        if self.side is None:
            if self.strict:
                self.teacher.score(self.chunks)
            return
        main = torch.cuda.current_stream()
        self.side.wait_event(self.ready)
        with torch.cuda.stream(self.side):
            self.teacher.score(self.chunks)
            done = torch.cuda.Event()
            done.record(self.side)
        if self.strict:
            main.wait_event(done)
        return done

    def advance(self):
        if self.ready is not None:
            self.ready.record()
        done = self.look_ahead()
        out = self.student(self.x)
        loss = out.float().pow(2).mean()
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


def event_logger(box):
    while True:
        time.sleep(0.2)
        box.append(time.time())
        del box[:-10]


def main():
    st = stage.Stage()
    dev = st.device
    d, rows = st.pick(2048, 32), st.pick(8192, 64)
    student = Student(d, st.pick(9, 2)).to(dev, torch.bfloat16)
    opt = torch.optim.SGD(student.parameters(), lr=1e-3)
    x = torch.randn(rows, d, device=dev, dtype=torch.bfloat16)
    teacher = Teacher(st, st.pick(256, 32), 16)
    pipe = Pipeline(st, teacher, student, opt, x)
    stage.background(event_logger, "h2d-copier", [])

    def turn(a):
        if a:
            pipe.chunks = int(a)
        pipe.strict = a > 0

    knob = stage.Knob("stream_dependency", "Pipeline.look_ahead", turn, st.pick(12, 4), "middle", alt="Pipeline.advance",
                      follow=True)
    st.perform(pipe.advance, [knob])


if __name__ == "__main__":
    main()
