# SPDX-License-Identifier: Apache-2.0
"""Serving of grouped requests; every group plays a prepared sequence of kernels."""
import stage
import threading
import time
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class Trunk(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        for lin in self.maps:
            x = x + 0.1 * F.gelu(lin(self.norm(x)))
        return x.mean(1)


class Page:
    def __init__(self, play, out):
        self.play, self.out = play, out


class Book:
    """Prepared sequences, the longest unused goes first."""

    def __init__(self, net, dev, room):
        self.net, self.dev, self.room = net, dev, room
        self.pages = OrderedDict()
        if dev == "cuda":
            self.side = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
            self._dry = False

    def record(self, x):
        if self.dev != "cuda":
            traced = torch.jit.trace(self.net, x, check_trace=False)
            return Page(lambda: traced(x), None)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            if not self._dry:
                self.net(x)
                torch.cuda.synchronize()
                self._dry = True
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            out = self.net(x)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)
        return Page(graph.replay, out)

    def entry(self, key, x):
        page = self.pages.get(key)
        if page is None:
            page = self.pages[key] = self.record(x)
            if len(self.pages) > self.room:
                self.pages.popitem(last=False)
        self.pages.move_to_end(key)
        return page


class Service:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        kind = torch.float32 if tiny else torch.bfloat16
        dim, depth, self.rows, self.groups = (64, 2, 16, 6) if tiny else (2048, 10, 2048, 16)
        self.net = Trunk(dim, depth).to(self.dev, kind)
        self.slots = [torch.randn(self.rows, dim, device=self.dev, dtype=kind) for _ in range(4)]
        self.book = Book(self.net, self.dev, 64)
        self.odd = stage.Dial(2 if tiny else 10)
        self.due, self.clock = 0.0, 0

    def serve(self):
        self.clock += 1
        plan = [self.book.entry(("even", g % 4), self.slots[g % 4]) for g in range(self.groups)]
        self.due = self.due + self.odd() if self.odd() else 0.0
        g = 0
        while self.due >= 1:
            plan[g % self.groups] = self.book.entry((self.clock, g), self.slots[g % 4])
            self.due -= 1
            g += 1
        for page in plan:
            out = page.play()
        last = plan[-1].out if plan[-1].out is not None else out
        return last.float().sum().item()


def janitor(book):
    """Looks whether the book is too long; it never is."""
    while True:
        time.sleep(0.05)
        if len(book.pages) > 1000:
            book.pages.clear()


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    service = Service(args)
    threading.Thread(target=janitor, args=(service.book,), name="gc-collect", daemon=True).start()
    stage.conduct(args, service.serve, [service.odd])


if __name__ == "__main__":
    main()
