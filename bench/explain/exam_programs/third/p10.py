# SPDX-License-Identifier: Apache-2.0
"""Embedding service: several threads with a stream each answer requests; results go to a shared index."""
import json
import os
import random
import tempfile
import threading
import time
import torch
from rig import Kit, Net, DEV

CUDA = DEV.type == "cuda"


class Index:
    def __init__(self, limit, path):
        self.lock = threading.Lock()
        self.rows = {}
        self.limit, self.path = limit, path

    def add(self, key, value):
        with self.lock:
            self.rows[key] = value
            if len(self.rows) > self.limit:
                self.rows.pop(next(iter(self.rows)))

    def write(self, data):
        with open(self.path, "w") as f:
            json.dump(data, f)

    def upload(self, seconds):
        """stands for the transfer to the object store"""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, 0.004))

    def publish(self, seconds):
        with self.lock:
            self.write(list(self.rows.items())[-50:])
            self.upload(seconds)

    def publish_copy(self, seconds):
        with self.lock:
            data = list(self.rows.items())[-50:]
        self.write(data)
        self.upload(seconds)


class Answerer(threading.Thread):
    def __init__(self, num, net, index, batch, d):
        super().__init__(name="encoder-%d" % num, daemon=True)
        self.net, self.index, self.done = net, index, 0
        self.x = torch.randn(batch, d, device=DEV)
        self.stream = torch.cuda.Stream() if CUDA else None
        self.r = random.Random(num)

    @torch.no_grad()
    def answer(self):
        y = self.net(self.x)
        key, value = y.mean(0)[:2].tolist()
        self.index.add("%08x" % self.r.getrandbits(32), (key, value))
        self.done += 1

    def run(self):
        if CUDA:
            torch.cuda.set_stream(self.stream)
        while True:
            self.answer()


def publisher(kit, index, period, share):
    while True:
        if kit.on:
            index.publish(period * share)
        else:
            index.publish_copy(period * share)
        time.sleep(period * (1 - share))


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([1024, 1536, 2048]), 32)
    batch = kit.n(rng.choice([256, 384, 512]), 4)
    threads = kit.n(rng.choice([2, 3, 4]), 2)
    period = rng.uniform(0.06, 0.12)
    share = kit.share(0.7, 0.92, 1.1)
    net = Net(d, kit.n(6, 1)).to(DEV).eval()
    fd, path = tempfile.mkstemp(suffix=".json")
    os.close(fd)
    index = Index(2000, path)

    def clean_up():
        index.path = os.devnull
        time.sleep(0.3)
        os.remove(path)

    kit.at_end.append(clean_up)
    net(torch.zeros(1, d, device=DEV))
    if CUDA:
        torch.cuda.synchronize()
    team = [Answerer(i, net, index, batch, d) for i in range(threads)]
    for a in team:
        a.start()
    threading.Thread(target=publisher, args=(kit, index, period, share), name="gpu-monitor", daemon=True).start()
    kit.cause("lock", kit.place(Index.publish, "with self.lock"),
              "the index lock is held during a slow upload", "publisher thread")
    kit.clock(lambda: sum(a.done for a in team))


if __name__ == "__main__":
    main()
