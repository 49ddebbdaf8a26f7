# SPDX-License-Identifier: Apache-2.0
"""Tomography: iterative reconstruction of slices; a re-projection helper of the same job shares the device."""
import sys, threading, time
import exam_kit
from exam_kit import Cause


class Reprojector:
    """Helper process: redraws old slices whenever it is told to."""

    def __init__(self):
        import torch
        self.torch = torch
        self.dev = exam_kit.device()
        n = 2048 if self.dev.type == "cuda" else 64
        self.a = torch.randn(n, n, device=self.dev)
        self.b = torch.randn(n, n, device=self.dev)
        self.level = 0.0
        self.unit = self.burst(20) / 20
        self.unit = self.burst(20) / 20

    def burst(self, k):
        t0 = time.perf_counter()
        for _ in range(k):
            self.torch.mm(self.a, self.a, out=self.b)
        exam_kit.sync()
        return time.perf_counter() - t0

    def listen(self):
        for line in sys.stdin:
            self.level = float(line)
        self.level = -1.0

    def serve(self):
        threading.Thread(target=self.listen, daemon=True).start()
        print("up", flush=True)
        period = 0.040
        while self.level >= 0:
            if self.level == 0:
                time.sleep(0.005)
                continue
            t0 = time.perf_counter()
            self.burst(max(1, round(self.level * period / self.unit)))
            time.sleep(max(0.0, period - (time.perf_counter() - t0)))


class Reconstruction:
    def __init__(self, rng, smoke, dev):
        import torch
        self.torch = torch
        import subprocess
        self.helper = exam_kit.spawn(__file__, "--role", "reproject", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        rays, vox = (64, 32) if smoke else (rng.choice([12288, 16384]), 8192)
        self.A = torch.rand(rays, vox, device=dev) / vox
        self.slices = 4 if smoke else rng.choice([192, 256])
        self.x = torch.zeros(vox, self.slices, device=dev)
        self.y = self.A @ torch.rand(vox, self.slices, device=dev)
        self.helper.stdout.readline()
        self.causes = [Cause("gpu_cotenant", "Reprojector.burst", self.set_level, 0.25, 0.01, 1.5, also="Reconstruction.step")]

    def set_level(self, a, on):
        self.helper.stdin.write(f"{a if on else 0}\n")
        self.helper.stdin.flush()
        time.sleep(0.08)

    def step(self):
        torch = self.torch
        with torch.no_grad():
            for _ in range(4):
                r = self.y - self.A @ self.x
                self.x.add_(self.A.t() @ r, alpha=0.5).clamp_(0, 2)
        return r.square().mean().item()


if __name__ == "__main__":
    if "--role" in sys.argv:
        exam_kit.die_with_parent()
        Reprojector().serve()
    else:
        exam_kit.main(Reconstruction, "mid", "a second process of the job runs matrix products on the same GPU")
