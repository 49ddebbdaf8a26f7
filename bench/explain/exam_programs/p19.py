# SPDX-License-Identifier: Apache-2.0
"""Two-thread inference: a shared feature cache behind one lock, snapshotted by a 'gc-worker' thread."""
import threading, time, zlib
import numpy as np, torch
from runkit import Kit, Net, DEV


class Cache:
    def __init__(self):
        self.lock = threading.Lock()
        self.rows = {}
        self.image = np.random.default_rng(0).integers(0, 50, 200_000, dtype=np.uint8).tobytes()

    def get(self, key):
        with self.lock:
            return self.rows.get(key)

    def snapshot(self, seconds):
        with self.lock:
            t = time.perf_counter()
            while time.perf_counter() - t < seconds:
                zlib.compress(self.image, 6)


def snapshots(kit, cache, hold, gap):
    while True:
        if kit.on:
            cache.snapshot(hold)
        time.sleep(gap)


def side_traffic(net, x):
    stream = torch.cuda.Stream() if DEV.type == "cuda" else None
    with torch.no_grad(), torch.cuda.stream(stream):
        while True:
            net(x)
            time.sleep(0.01)


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(12, 1)).to(DEV).eval()
    x = torch.randn(kit.n(kit.rng.choice([1024, 2048]), 4), d, device=DEV)
    threading.Thread(target=side_traffic, args=(net, x[:4].clone()), name="infer-2", daemon=True).start()
    cache = Cache()

    @torch.no_grad()
    def answer():
        return net(x).sum().item()

    base, _ = kit.measure(answer)
    s = kit.share(0.4)
    hold = max(0.03, 6 * base)
    kit.cause("lock", kit.place(Cache.get, "with self.lock"), "main waits for the lock held by snapshot (thread gc-worker)")
    threading.Thread(target=snapshots, args=(kit, cache, hold, hold * (1 - s) / s), name="gc-worker", daemon=True).start()
    for it in kit.steps():
        cache.get(it)
        answer()


if __name__ == "__main__":
    main(Kit(__file__))
