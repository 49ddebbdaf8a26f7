# SPDX-License-Identifier: Apache-2.0
"""Captured decode loop: the whole token step is one CUDA graph, four graphs are kept in flight."""
import threading
import torch
import torch.nn.functional as F
from rig import Job


class CapturedDecoder:
    def __init__(self, job):
        self.job = job
        d = self.d = job.pick(4096, 4608, tiny=32)
        self.b = job.pick(32, 64, tiny=2)
        mk = lambda a, b: torch.randn(a, b, device=job.dev, dtype=job.half) / a ** 0.5
        self.layers = [(mk(d, 4 * d), mk(4 * d, d), mk(d, d)) for _ in range(job.pick(10, 12, tiny=2))]
        self.vocab = mk(d, 16000 if job.cuda else 50)
        self.emb = torch.randn(self.vocab.shape[1], d, device=job.dev, dtype=job.half)
        self.tok = torch.zeros(self.b, dtype=torch.long, device=job.dev)
        self.launch = job.graph(self.token)

    @torch.no_grad()
    def token(self):
        for _ in range(3):
            x = self.emb[self.tok]
            for up, down, mix in self.layers:
                x = x + torch.tanh(x @ mix)
                x = F.layer_norm(x + F.gelu(x @ up) @ down, (self.d,))
            self.tok.copy_((x @ self.vocab).argmax(-1))


def poll_network(stop, seen):
    while not stop.wait(0.25):
        seen.append(len(seen))


def main():
    job = Job()
    dec = CapturedDecoder(job)
    stop, seen = threading.Event(), []
    t = threading.Thread(target=poll_network, args=(stop, seen), name="rpc-poller")
    t.start()

    def step():
        dec.launch()
        job.pace(4)

    job.rate(step, 0.05 if job.smoke else 1.0)
    job.show(step, lambda: None, [], healthy=True)
    stop.set()
    t.join()


if __name__ == "__main__":
    main()
