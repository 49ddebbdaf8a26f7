# SPDX-License-Identifier: Apache-2.0
"""Ranking model fed by own threads: 'publisher' makes batches, 'loader' only writes a heartbeat."""
import queue, threading, time, zlib
import numpy as np, torch
from runkit import Kit, Net, DEV


class Publisher(threading.Thread):
    def __init__(self, blobs, dim, repeat, out):
        super().__init__(name="publisher", daemon=True)
        self.blobs, self.dim, self.repeat, self.out = blobs, dim, repeat, out

    def unpack(self, k):
        return np.frombuffer(zlib.decompress(self.blobs[k % len(self.blobs)]), np.float32).reshape(-1, self.dim)

    def run(self):
        k = 0
        while True:
            for j in range(self.repeat):
                rows = self.unpack(k + j)
            self.out.put(torch.from_numpy(rows.copy()))
            k += 1


def heartbeat():
    n = 0
    while True:
        time.sleep(0.2)
        n = (n + 1) % 1000


def main(kit):
    dim, bs = kit.n(1024, 32), kit.n(kit.rng.choice([1024, 2048]), 8)
    net = Net(dim, kit.n(10, 1), 1).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    rows = np.random.default_rng(0).standard_normal((bs, dim)).astype(np.float32).round(1)
    blobs = [zlib.compress(rows.tobytes(), 1) for _ in range(2)]
    held = torch.from_numpy(rows).to(DEV)

    def train_step(x):
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss

    base, _ = kit.measure(lambda: train_step(held))
    s = kit.share(0.4)
    q = queue.Queue(4)
    p = Publisher(blobs, dim, 1, q)
    p.repeat = max(1, round(base / (1 - s) / kit.unit(lambda: p.unpack(0), 10)))
    kit.cause("input_pipeline", kit.place(Publisher.unpack, "zlib.decompress"), "one publisher thread unpacks too slowly")
    p.start()
    threading.Thread(target=heartbeat, name="loader", daemon=True).start()
    for it in kit.steps():
        x = q.get().to(DEV) if kit.on else held
        loss = train_step(x)
        if it % 10 == 9:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
