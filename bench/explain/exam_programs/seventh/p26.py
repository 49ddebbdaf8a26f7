# SPDX-License-Identifier: Apache-2.0
"""Image diffusion service: the denoiser is captured once as a CUDA graph and replayed for every step of a request."""
import queue, threading
import torch
import exam_kit


class Denoiser:
    def __init__(self, b, d, layers, dev):
        self.ws = [torch.randn(d, d, device=dev) / d ** 0.5 for _ in range(layers)]
        self.x = torch.randn(b, d, device=dev)
        self.dev = dev
        self.graph = None
        self.captures = 0

    def body(self):
        h = self.x
        for w in self.ws:
            h = torch.relu(h @ w)
        self.x.mul_(0.98).add_(h, alpha=0.02)

    def recapture_if_stale(self):
        if self.graph is not None or self.dev.type != "cuda":
            return
        self.captures += 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.body()
        torch.cuda.current_stream().wait_stream(side)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            self.body()
        self.graph = g

    def launch_many(self):
        if self.graph is None:
            self.body()
        else:
            self.graph.replay()


class Service:
    causes = []

    def __init__(self, rng, smoke, dev):
        b, d, layers = (8, 32, 2) if smoke else (512, rng.choice([2048, 2560]), 16)
        self.net = Denoiser(b, d, layers, dev)
        self.rounds = 3 if smoke else rng.choice([24, 30])
        self.done = queue.Queue()
        self.out = threading.Thread(target=self.sleep_poll, daemon=True, name="remote-wait")
        self.served = 0
        with torch.no_grad():
            self.net.recapture_if_stale()
        self.out.start()

    def sleep_poll(self):
        while self.done.get() is not None:
            self.served += 1

    @torch.no_grad()
    def step(self):
        for _ in range(self.rounds):
            self.net.recapture_if_stale()
            self.net.launch_many()
        self.done.put(self.net.x[0, :4].tolist())
        self.net.x.normal_()

    def close(self):
        self.done.put(None)


if __name__ == "__main__":
    exam_kit.main(Service, "healthy", "healthy: one captured graph, replayed; the device is busy throughout")
