# SPDX-License-Identifier: Apache-2.0
"""Node classification on a citation graph: sparse propagation, full-batch training, a run journal."""
import kit
import json
import warnings
import os
import tempfile
import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore", message=".*[Ss]parse.*")


def build_graph(nodes, degree, device):
    row = torch.arange(nodes, device=device).repeat_interleave(degree)
    col = torch.randint(0, nodes, (nodes * degree,), device=device)
    value = torch.full((nodes * degree,), 1.0 / degree, device=device)
    there = torch.sparse_coo_tensor(torch.stack([row, col]), value, (nodes, nodes)).coalesce().to_sparse_csr()
    back = torch.sparse_coo_tensor(torch.stack([col, row]), value, (nodes, nodes)).coalesce().to_sparse_csr()
    return there, back


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, h):
        ctx.graph = graph
        return graph[0] @ h

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.graph[1] @ grad


def make_params(sizes, device):
    params = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        params.append((torch.randn(a, b, device=device) / a ** 0.5).requires_grad_())
    return params


class Journal:
    folder = os.path.dirname(os.path.abspath(__file__))

    def __init__(self):
        try:
            fd, self.path = tempfile.mkstemp(prefix="run", dir=self.folder)
        except OSError:
            fd, self.path = tempfile.mkstemp(prefix="run")
        self.file = os.fdopen(fd, "w+b", buffering=0)
        self.lines = []
        self.pad = b" " * 32768 + b"\n"

    def note(self, epoch, loss):
        self.lines.append(json.dumps({"epoch": epoch, "loss": loss}))
        del self.lines[:-50]

    def settle(self, n):
        for _ in range(n):
            self.file.seek(0)
            self.file.write(self.lines[-1].encode() + self.pad)
            os.fdatasync(self.file.fileno())


def forward(adj, x, params):
    h = x
    for i, w in enumerate(params):
        h = Spread.apply(adj, h @ w)
        if i + 1 < len(params):
            h = F.relu(h)
    return h


def train(stage):
    nodes = stage.pick(40_000, 60_000, 80_000) if not stage.smoke else 300
    degree = stage.pick(10, 14) if not stage.smoke else 4
    width = stage.pick(128, 192) if not stage.smoke else 16
    adj = build_graph(nodes, degree, stage.device)
    x = torch.randn(nodes, width, device=stage.device)
    y = torch.randint(0, 16, (nodes,), device=stage.device)
    params = make_params([width, width, width, 16], stage.device)
    opt = torch.optim.Adam(params, lr=1e-3, foreach=True)
    journal = Journal()
    stage.at_end(lambda: os.unlink(journal.path))
    epoch = 0
    while True:
        loss = F.cross_entropy(forward(adj, x, params), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch += 1
        journal.note(epoch, loss.item())
        journal.settle(stage.times("a"))
        if not stage.tick():
            return


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("io", "Journal.settle", kit.LIGHT, start=1.0, least=0.004),
    }, "the journal is synced to disk within the epoch", window=0.8)
    train(stage)
    stage.leave()
