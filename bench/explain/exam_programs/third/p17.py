# SPDX-License-Identifier: Apache-2.0
"""Batch decoder whose CUDA graphs live in a cache keyed by the request mix."""
import threading
import torch
from rig import Kit, Net, DEV


class GraphCache:
    """captured programs, newest last"""
    def __init__(self, kit, limit):
        self.kit, self.limit, self.items = kit, limit, {}
        self.hits = self.misses = 0

    def get(self, key, fn):
        run = self.items.pop(key, None)
        if run is None:
            self.misses += 1
            run = self.capture(fn)
        else:
            self.hits += 1
        self.items[key] = run
        while len(self.items) > self.limit:
            del self.items[next(iter(self.items))]
        return run

    def capture(self, fn):
        return self.kit.graph(fn)


class Decoder:
    def __init__(self, d, depth, rows):
        dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
        with DEV:
            self.net = Net(d, depth, d).to(dt).eval()
        self.x = torch.randn(rows, d, device=DEV, dtype=dt)

    def program(self, rows):
        view = self.x[:rows]

        def run():
            view.copy_(torch.tanh(self.net(view)))
        return run


class Mix:
    """sizes of the batches that the queue delivers"""
    def __init__(self, rng, rows, burst):
        self.sizes = [max(1, rows - 8 * k) for k in range(5)]
        self.rng, self.burst, self.serial = rng, burst, 0

    def exact(self, i):
        """key with the requests in it"""
        if i % self.burst == 0:
            self.serial += 1
        size = self.sizes[self.serial % len(self.sizes)]
        return (size, self.serial), size

    def bucketed(self, i):
        size = self.sizes[(i // self.burst) % len(self.sizes)]
        return size, size


def checkpoint_writer(stop):
    while not stop.wait(0.4):
        pass


@torch.no_grad()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([2048, 2560]), 32)
    rows = kit.n(rng.choice([1024, 1536, 2048]), 48)
    dec = Decoder(d, kit.n(rng.choice([12, 16, 20]), 1), rows)
    cache = GraphCache(kit, 8)
    stop = threading.Event()
    threading.Thread(target=checkpoint_writer, args=(stop,), name="checkpoint_writer", daemon=True).start()
    share = kit.share(0.68, 0.92, 1.1)
    base, _ = kit.measure(cache.get("probe", dec.program(rows)))
    cost = kit.unit(lambda: cache.capture(dec.program(rows)), 5)
    burst = max(1, round(cost * (1 - share) / share / base))
    mix = Mix(rng, rows, burst)
    for k in range(5):                          # the usual sizes are captured before the service opens
        key, size = mix.bucketed(k * burst)
        cache.get(key, dec.program(size))
    usual = dict(cache.items)
    kit.ablate.append(lambda: cache.items.update(usual))
    kit.cause("recompilation", kit.place(GraphCache.get, "self.capture(fn)"),
              "the key holds a serial number, so that graphs are captured again and again", "GraphCache")
    for i in kit.steps(warm=max(10, 2 * burst)):
        key, size = mix.exact(i) if kit.on else mix.bucketed(i)
        cache.get(key, dec.program(size))()


if __name__ == "__main__":
    main()
