# SPDX-License-Identifier: Apache-2.0
"""Token by token decoding with a small language model; the step is one replayed graph on the device."""
import queue
import threading

import stage
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, d, heads, room, batch, device, dtype):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)
        self.keys = torch.randn(batch, heads, room, d // heads, device=device, dtype=dtype)
        self.vals = torch.randn(batch, heads, room, d // heads, device=device, dtype=dtype)

    def forward(self, x, at):
        b, d = x.shape
        q, k, v = self.qkv(F.layer_norm(x, (d,))).view(b, 3, self.h, 1, d // self.h).unbind(1)
        self.keys.index_copy_(2, at, k)
        self.vals.index_copy_(2, at, v)
        a = F.scaled_dot_product_attention(q, self.keys, self.vals).reshape(b, d)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (d,)))))


class Decoder:
    def __init__(self, opts):
        s = opts.smoke
        d, n, self.room, b = (32, 2, 16, 2) if s else (2048, 24, 1024, 64)
        dt = torch.float32 if s else torch.bfloat16
        with torch.device(opts.device):
            self.layers = nn.ModuleList(Layer(d, 2 if s else 16, self.room, b, opts.device, dt) for _ in range(n))
        self.layers.to(opts.device, dt)
        self.embed = torch.randn(64 if s else 32000, d, device=opts.device, dtype=dt) * 0.02
        self.tok = torch.zeros(b, dtype=torch.long, device=opts.device)
        self.at = torch.zeros(1, dtype=torch.long, device=opts.device)
        self.graph = None
        if not s:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side), torch.no_grad():
                for _ in range(3):
                    self.compute()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(self.graph):
                self.compute()

    def compute(self):
        x = self.embed[self.tok]
        for layer in self.layers:
            x = layer(x, self.at)
        self.tok.copy_((x @ self.embed.t()).argmax(-1))
        self.at.add_(1).remainder_(self.room)

    @torch.no_grad()
    def wait_for_token(self):
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()
        return self.tok.tolist()


class StallReporter(threading.Thread):
    """Writes finished lines; sleeps nearly always."""

    def __init__(self):
        super().__init__(name="gpu-stall-blocker", daemon=True)
        self.inbox = queue.Queue()
        self.lines = 0

    def run(self):
        while True:
            self.inbox.get()
            self.lines += 1


def main():
    opts = stage.options()
    torch.manual_seed(opts.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    dec = Decoder(opts)
    out = StallReporter()
    out.start()

    def step():
        out.inbox.put(dec.wait_for_token()[0])

    stage.conduct(opts, step, [])


if __name__ == "__main__":
    main()
