# SPDX-License-Identifier: Apache-2.0
"""Online learner: the main thread trains and publishes weights' norms, a recorder thread packs the journal."""
import threading
import time
import zlib
import torch
import torch.nn as nn
from rig import Job


class Router:
    def __init__(self, size):
        self.mu = threading.Lock()
        self.journal = bytearray(size)
        self.seq = 0
        self.gap = 0.004
        self.inside = True
        self.amount = 0
        self.alive = True

    def publish(self, value):
        with self.mu:
            self.seq += 1
            p = (self.seq * 8) % (len(self.journal) - 8)
            self.journal[p:p + 8] = self.seq.to_bytes(8, "little")
            return value

    def pack_forever(self):
        while self.alive:
            n = int(self.amount)
            if n <= 0:
                time.sleep(0.002)
                continue
            if self.inside:
                with self.mu:
                    zlib.crc32(zlib.compress(memoryview(self.journal)[:n], 1))
            else:
                with self.mu:
                    part = bytes(memoryview(self.journal)[:n])
                zlib.crc32(zlib.compress(part, 1))
            time.sleep(self.gap)


class Learner:
    def __init__(self, job, router):
        self.job, self.router = job, router
        w = job.pick(2048, 3072, tiny=32)
        self.net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(w, w), nn.GELU())]).to(job.dev, job.half)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.x = torch.randn(job.pick(4096, 6144, tiny=8), w, device=job.dev, dtype=job.half)

    def learn(self):
        for part in self.x.chunk(4):
            loss = (self.net(part) - part).float().pow(2).mean()
            loss.backward()
            self.router.publish(None)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.router.publish(float(loss.detach()))


def main():
    job = Job(0.11, 0.2)
    router = Router(1 << (14 if job.smoke else 23))
    learner = Learner(job, router)
    t = threading.Thread(target=router.pack_forever, name="gpu-waiter")
    t.start()

    def setk(k):
        router.amount = min(int(k), len(router.journal))

    try:
        job.tune(learner.learn, setk, 300_000, len(router.journal), secs=0.4)

        def off():
            router.inside = False

        job.show(learner.learn, off, [("lock", "Router.publish")], holder="Router.pack_forever")
    finally:
        router.alive = False
        t.join()


if __name__ == "__main__":
    main()
