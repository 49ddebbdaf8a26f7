# SPDX-License-Identifier: Apache-2.0
"""Seismic trace conditioning: a Triton gain kernel, then a matmul-based migration operator."""
import threading
import torch
from rig import Job

try:
    import triton
    import triton.language as tl
except Exception:      # no Triton here: the plain formula serves the smoke test
    triton = None

if triton is not None:
    @triton.jit
    def gain_kernel(x, y, n, tiles, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
        pid = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, BLOCK).to(tl.int64)
        if STRIDED:
            at = lane * tiles + (pid * 7919) % tiles
        else:
            at = pid * BLOCK + lane
        ok = at < n
        v = tl.load(x + at, mask=ok, other=0.0)
        tl.store(y + at, v * 0.98 + 0.01 * v * v, mask=ok)

BLOCK = 1024


class Gain:
    """The first `columns` samples go through the column-major variant."""

    def __init__(self, n):
        self.n = n
        self.columns = 0

    def part(self, x, y, strided):
        n = x.numel()
        if n == 0:
            return
        if triton is None or not x.is_cuda:
            y.copy_(x * 0.98 + 0.01 * x * x)
            return
        tiles = triton.cdiv(n, BLOCK)
        gain_kernel[(tiles,)](x, y, n, tiles, STRIDED=strided, BLOCK=BLOCK)

    def condition(self, x, y):
        c = min(self.n, self.columns // BLOCK * BLOCK)
        if (c // BLOCK) % 7919 == 0:
            c = max(0, c - BLOCK)
        self.part(x[:c], y[:c], True)
        self.part(x[c:], y[c:], False)


class Migration:
    def __init__(self, job):
        self.job = job
        self.n = (job.pick(96, 128, 160) << 20) if job.cuda else 4096
        self.x = torch.randn(self.n, device=job.dev).clamp_(-2, 2)
        self.y = torch.empty_like(self.x)
        self.gain = Gain(self.n)
        m = self.m = job.pick(2048, 3072, tiny=32)
        self.op = torch.randn(m, m, device=job.dev, dtype=job.half) / m ** 0.5
        self.reps = 1

    @torch.no_grad()
    def shot(self):
        self.gain.condition(self.x, self.y)
        h = self.y[:self.m * self.m // 2].view(-1, self.m).to(self.op.dtype)
        for _ in range(self.reps):
            h = torch.tanh(h @ self.op)
        self.image = h.float().abs().mean()
        self.job.pace(2)


def main():
    job = Job(0.46, 0.62)
    mig = Migration(job)
    threading.Thread(target=threading.Event().wait, name="io_worker", daemon=True).start()

    def setk(k):
        mig.gain.columns = int(k)

    setk(mig.n)
    mig.shot()
    setk(0)
    mig.shot()
    job.fence()
    if job.cuda:
        # how much the layout alone can cost decides how large the rest of the shot may be
        slow = (setk(mig.n), job.rate(mig.shot, 0.1))[1]
        fast = (setk(0), job.rate(mig.shot, 0.1))[1]
        room = max(1e-4, slow - fast) * 0.8 * (1 - job.share) / job.share
        job.size(mig.shot, lambda n: setattr(mig, "reps", n), 4, max(fast * 1e3 * 1.05, min(8.0, room * 1e3)), 300)
    job.tune(mig.shot, setk, mig.n // 2, mig.n)
    job.show(mig.shot, lambda: setk(0), [("device_memory_bandwidth", "Gain.condition")], also="gain_kernel")


if __name__ == "__main__":
    main()
