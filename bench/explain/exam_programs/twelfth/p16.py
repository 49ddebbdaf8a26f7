# SPDX-License-Identifier: Apache-2.0
"""Token by token generation with a captured decoder step."""
import stage
import threading
import time

import torch
import torch.nn.functional as F


class Layer:
    def __init__(self, dim, batch, keep, heads, make):
        self.heads = heads
        self.qkv, self.out = make(3 * dim, dim), make(dim, dim)
        self.up, self.down = make(4 * dim, dim), make(dim, 4 * dim)
        self.keys, self.vals = make(batch, heads, keep, dim // heads), make(batch, heads, keep, dim // heads)

    def __call__(self, x):
        b, d = x.shape
        q, k, v = F.linear(F.layer_norm(x, (d,)), self.qkv).view(b, 3, self.heads, 1, -1).unbind(1)
        self.keys[:, :, -1:].copy_(k)
        self.vals[:, :, -1:].copy_(v)
        x = x + F.linear(F.scaled_dot_product_attention(q, self.keys, self.vals).reshape(b, d), self.out)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (d,)), self.up)), self.down)


class Generator:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        kind = torch.float32 if tiny else torch.bfloat16
        dim, batch, keep, heads, depth, vocab = (64, 2, 16, 4, 2, 128) if tiny else (4096, 32, 512, 32, 16, 32000)
        make = lambda *shape: torch.randn(*shape, device=self.dev, dtype=kind) * 0.02
        self.layers = [Layer(dim, batch, keep, heads, make) for _ in range(depth)]
        self.table = make(vocab, dim)
        self.ids = torch.zeros(batch, dtype=torch.long, device=self.dev)
        self.sink = [[] for _ in range(batch)]
        self.graph = None
        if not tiny:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.decode()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.decode()

    def decode(self):
        x = self.table[self.ids]
        for layer in self.layers:
            x = layer(x)
        self.ids.copy_(F.linear(x, self.table).argmax(-1))

    def advance(self):
        """Four tokens of each request; they are sent out as they come."""
        for _ in range(4):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.decode()
            for out, token in zip(self.sink, self.ids.cpu().tolist()):
                out.append(token)
        if len(self.sink[0]) > 4000:
            for out in self.sink:
                out.clear()


def gc_daemon(gen):
    """Busy from time to time: counts what was sent."""
    while True:
        total = 0
        for out in gen.sink:
            total += len(out)
        time.sleep(0.01)


def wait_remote(event):
    while not event.wait(1.0):
        pass


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    gen = Generator(args)
    threading.Thread(target=gc_daemon, args=(gen,), name="gc-daemon", daemon=True).start()
    threading.Thread(target=wait_remote, args=(threading.Event(),), name="remote-wait", daemon=True).start()
    stage.conduct(args, gen.advance)


if __name__ == "__main__":
    main()
