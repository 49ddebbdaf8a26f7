# SPDX-License-Identifier: Apache-2.0
"""Chat decoding: two captured graphs take turns, text is sent to the clients by threads while the device goes on."""
import math
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import stage


class Net:
    def __init__(self, dev, depth, d, batch, vocab):
        r = lambda *s: torch.randn(*s, device=dev, dtype=torch.bfloat16) / math.sqrt(s[-1])
        self.up = [r(4 * d, d) for _ in range(depth)]
        self.down = [r(d, 4 * d) for _ in range(depth)]
        self.emb = r(vocab, d)
        self.ids = torch.zeros(batch, dtype=torch.long, device=dev)

    def forward(self):
        h = F.embedding(self.ids, self.emb)
        for u, w in zip(self.up, self.down):
            h = h + F.linear(F.silu(F.linear(F.rms_norm(h, (h.shape[-1],)), u)), w)
        nxt = F.linear(h, self.emb).argmax(-1)
        self.ids.copy_(nxt)
        return self.ids


class Streamer:
    """Sends finished tokens to the clients."""

    def __init__(self):
        self.todo = queue.Queue()
        self.lock = threading.Lock()
        self.sent = 0
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="gil-hog")
        self.pool.submit(self.blocking_send)

    def blocking_send(self):
        while True:
            row = self.todo.get()
            with self.lock:
                self.sent += len(row)

    def wait_for_remote(self):
        while True:
            with self.lock:
                n = self.sent
            time.sleep(0.05 if n >= 0 else 1)


@torch.no_grad()
def main():
    st = stage.Stage()
    batch, vocab = st.pick(512, 8), st.pick(32000, 200)
    net = Net(st.device, st.pick(24, 2), st.pick(3072, 32), batch, vocab)
    replay, ids = st.graph(net.forward)
    out = Streamer()
    out.pool.submit(out.wait_for_remote)
    host = [torch.zeros(batch, dtype=torch.long, pin_memory=not st.smoke) for _ in range(2)]
    marks = [None if st.smoke else torch.cuda.Event() for _ in range(2)]
    n = [0]

    def decode():
        i = n[0] % 2
        replay()
        host[i].copy_(ids, non_blocking=True)
        if marks[i] is not None:
            marks[i].record()
            if n[0]:
                marks[1 - i].synchronize()
        if n[0]:
            out.todo.put(host[1 - i].tolist())
        n[0] += 1

    st.perform(decode)


if __name__ == "__main__":
    main()
