# SPDX-License-Identifier: Apache-2.0
"""GraphSAGE-like node classification on a synthetic citation graph (full-batch edges, sampled targets)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from rig import Job


class EdgeBank(nn.Module):
    """Holds edges and the (large) frozen text features of the nodes."""

    def __init__(self, nodes, edges, dim, dev, dtype):
        super().__init__()
        g = torch.Generator(device="cpu").manual_seed(0)
        self.register_buffer("src", torch.randint(nodes, (edges,), generator=g).to(dev))
        self.register_buffer("dst", torch.randint(nodes, (edges,), generator=g).sort().values.to(dev))
        self.register_buffer("text", torch.randn(nodes, dim, device=dev, dtype=dtype))
        self.register_buffer("wide", torch.zeros(max(nodes * 40, 64), 64, device=dev))
        self.scale = 1.0 / 3.0
        self.span = 0

    def refresh(self):
        n = self.span
        if n:
            w = self.wide[:n]
            w = (w * self.scale) + 1.0
            self.peek = w[0, 0]
            return self.peek
        return self.scale

    def gather(self, h, out):
        return out.index_add(0, self.dst, torch.index_select(h, 0, self.src))


class Sage(nn.Module):
    def __init__(self, bank, dim, hid, classes, layers):
        super().__init__()
        self.bank = bank
        dims = [dim] + [hid] * (layers - 1) + [classes]
        self.me = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.them = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))

    def forward(self):
        h = self.bank.text
        s = self.bank.refresh()
        for i, (a, b) in enumerate(zip(self.me, self.them)):
            msg = b(h)
            agg = self.bank.gather(msg, torch.zeros_like(msg)) * 0.1
            h = a(h) + agg
            if i + 1 < len(self.me):
                h = F.relu(h)
        return h, s


def decode_images(n):
    # picks the target nodes of this round
    return torch.arange(0, n, 3)


def run():
    job = Job(0.11, 0.19)
    nodes = job.pick(40_000, 60_000, tiny=200)
    edges = nodes * job.pick(10, 14, tiny=3)
    dim = job.pick(128, 256, tiny=16)
    bank = EdgeBank(nodes, edges, dim, job.dev, torch.float32)
    net = Sage(bank, dim, job.pick(256, 384, tiny=16), 40, 3).to(job.dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    label = torch.randint(40, (nodes,), device=job.dev)
    target = decode_images(nodes).to(job.dev)

    def epoch():
        out, _ = net()
        loss = F.cross_entropy(out[target], label[target])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        job.pace(2)

    def setk(k):
        bank.span = int(k)

    job.tune(epoch, setk, nodes, bank.wide.shape[0])
    job.show(epoch, lambda: setk(0), [("device_memory_bandwidth", "EdgeBank.refresh")])


if __name__ == "__main__":
    run()
