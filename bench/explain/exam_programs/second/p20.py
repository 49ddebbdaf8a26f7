# SPDX-License-Identifier: Apache-2.0
"""Three serving threads share a vocabulary table."""
import os, threading, time, zlib
import torch
from rig import Kit, Net, DEV


class Table:
    def __init__(self, n):
        self.turn, self.map = threading.Lock(), {i: (i * 7919) % n for i in range(n)}
        self.raw = os.urandom(1 << 17) * 4

    def look(self, words):
        with self.turn:
            return [self.map[w] for w in words]

    def press(self, seconds):
        t = time.perf_counter()
        while time.perf_counter() - t < seconds:
            zlib.compress(self.raw, 1)


def beacon(kit, table, hold, gap):
    while True:
        if kit.on:
            with table.turn:
                table.press(hold)
        else:
            table.press(hold)
        time.sleep(gap)


@torch.no_grad()
def serve(kit, table, net, emb, n, done, me):
    stream = torch.cuda.Stream() if DEV.type == "cuda" else None
    if stream:
        torch.cuda.set_stream(stream)
    words = [(me * 37 + i) % n for i in range(64)]
    while True:
        ids = torch.tensor(table.look(words), device=DEV)
        net(emb[ids]).argmax(-1).tolist()
        done[me] += 1


def main(kit):
    torch.set_num_threads(1)
    n, d = kit.n(20000, 200), kit.n(kit.rng.choice([1024, 1536]), 16)
    net, emb, table = Net(d, kit.n(8, 1), 32).to(DEV), torch.randn(n, d, device=DEV), Table(n)
    done, s = [0, 0, 0], kit.share(0.7, 0.95, 1.1)
    hold = kit.rng.uniform(0.015, 0.04)
    kit.cause("lock", kit.place(Table.look, "with self.turn"), "serving threads wait for the lock; thread prefetch-1 (beacon) holds it while it compresses")
    for i, name in enumerate(["gpu-feed", "sleepy", "io-wait"]):
        threading.Thread(target=serve, args=(kit, table, net, emb, n, done, i), name=name, daemon=True).start()
    threading.Thread(target=beacon, args=(kit, table, hold, hold * (1 - s) / s), name="prefetch-1", daemon=True).start()
    kit.clock(lambda: sum(done))


if __name__ == "__main__":
    main(Kit(__file__))
