# SPDX-License-Identifier: Apache-2.0
"""Influence ranking in a dense trade network: power iteration over the full flow matrix."""
import threading
import torch
import exam_kit as kit

job = kit.Job("p22")
FIRMS = job.size([24_000, 28_000, 32_000], 200)
SWEEPS = job.size([6, 8, 10], 2)


class LockedLedger:
    """Keeps the top of the ranking; readers come rarely."""

    def __init__(self):
        self.lock = threading.Lock()
        self.top = []
        self.stop = threading.Event()
        self.reader = threading.Thread(target=self.fsync_all, name="fsync-worker", daemon=True)
        self.reader.start()

    def fsync_all(self):
        while not self.stop.wait(1.0):
            with self.lock:
                self.top = self.top[:10]

    def publish(self, top):
        with self.lock:
            self.top = top

    def close(self):
        self.stop.set()
        self.reader.join(2)


class CopyHeavyRanker:
    def __init__(self):
        g = torch.Generator(device=job.dev).manual_seed(job.seed)
        self.flow = torch.rand(FIRMS, FIRMS, device=job.dev, generator=g)
        self.flow.div_(self.flow.sum(0, keepdim=True))
        self.rank = torch.full((FIRMS,), 1.0 / FIRMS, device=job.dev)
        self.next = torch.empty_like(self.rank)
        self.jump = 0.15 / FIRMS
        self.ledger = LockedLedger()
        self.n = 0

    def redundant_copy_pass(self):
        torch.mv(self.flow, self.rank, out=self.next)
        self.next.mul_(0.85).add_(self.jump)
        self.rank, self.next = self.next, self.rank

    @torch.no_grad()
    def step(self):
        for _ in range(SWEEPS):
            self.redundant_copy_pass()
        self.n += 1
        if self.n % 40 == 0:
            self.ledger.publish(self.rank.topk(20).indices.tolist())


def main():
    r = CopyHeavyRanker()
    kit.on_close(r.ledger.close)
    kit.examine(job, [], "healthy: each sweep must read the whole matrix once, limited by memory bandwidth; ledger, lock and "
                "thread are idle, a read-back every 40 steps", step=r.step)


if __name__ == "__main__":
    main()
