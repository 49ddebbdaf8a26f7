# SPDX-License-Identifier: Apache-2.0
"""Sentence embedding behind an asyncio front: many clients, one batcher."""
import asyncio, threading, time
import torch
from rig import Kit, Net, DEV


class Ledger:
    """credits are given out at a fixed pace"""
    def __init__(self, pace):
        self.pace, self.free, self.last = pace, 0.0, time.perf_counter()

    async def claim(self):
        while True:
            now = time.perf_counter()
            self.free = min(2.0, self.free + (now - self.last) * self.pace)
            self.last = now
            if self.free >= 1:
                self.free -= 1
                return
            await asyncio.sleep((1 - self.free) / self.pace)


async def client(q, n, rng):
    while True:
        done = asyncio.get_running_loop().create_future()
        await q.put((rng.randrange(n), done))
        await done


async def serve(kit, net, table, ledger, bs):
    q = asyncio.Queue(maxsize=4 * bs)
    keep = [asyncio.create_task(client(q, len(table), kit.rng)) for _ in range(2 * bs)]
    for _ in kit.steps():
        jobs = [await q.get() for _ in range(bs)]
        if kit.on:
            await ledger.claim()
        with torch.no_grad():
            rows = torch.tensor([j[0] for j in jobs], device=DEV)
            vec = torch.nn.functional.normalize(net(table[rows]).mean(1), dim=-1).cpu()
        for (_, done), v in zip(jobs, vec):
            done.set_result(v)
    return keep


def main(kit):
    d, bs = kit.n(kit.rng.choice([768, 1024]), 32), kit.n(kit.rng.choice([16, 32]), 2)
    net = Net(d, kit.n(12, 1), 128).to(DEV)
    table = torch.randn(kit.n(2048, 16), kit.n(64, 4), d, device=DEV)
    threading.Thread(target=threading.Event().wait, name="lock-keeper", daemon=True).start()
    rows = torch.arange(bs, device=DEV)

    def one():
        with torch.no_grad():
            net(table[rows]).mean(1).cpu()

    base, _ = kit.measure(one)
    ledger = Ledger((1 - kit.share(0.68, 0.95, 1.15)) / (base + bs * 2e-5))
    kit.cause("sleep_or_remote_wait", kit.place(Ledger.claim, "asyncio.sleep"), "a pace limiter sleeps before each batch")
    asyncio.run(serve(kit, net, table, ledger, bs))


if __name__ == "__main__":
    main(Kit(__file__))
