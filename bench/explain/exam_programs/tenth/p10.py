# SPDX-License-Identifier: Apache-2.0
"""Graph-network training on sampled blocks; node records are kept as one small file each."""
import os
import shutil
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class NodeStore:
    """Node records on local disk, 8 KB each."""

    def __init__(self, count):
        self.root = tempfile.mkdtemp(prefix="nodes")
        self.paths = []
        for i in range(count):
            path = os.path.join(self.root, f"{i:05d}.rec")
            with open(path, "wb") as f:
                f.write(os.urandom(8192))
            self.paths.append(path)
        self.want, self.at = 0, 0

    def pull(self):
        total = 0
        for _ in range(self.want):
            with open(self.paths[self.at], "rb", buffering=0) as f:
                total += len(f.read())
            self.at = (self.at + 1) % len(self.paths)
        return total


class EdgeMixer:
    """Gated messages over the edges of a block."""

    def __init__(self, edges, dim, dev):
        self.msg = torch.randn(edges, dim, device=dev)
        self.gate = torch.rand(edges, dim, device=dev)
        self.out = torch.empty(edges, dim, device=dev)
        self.edges = 0

    def mix(self):
        n = self.edges
        if not n:
            return 0.0
        m, g, o = self.msg[:n], self.gate[:n], self.out[:n]
        torch.mul(m, g, out=o)
        o.tanh_()
        o.add_(m)
        o.mul_(g)
        o.sigmoid_()
        o.sub_(g)
        o.relu_()
        return o[0].mean()


class Sage(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.nbr = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))

    def forward(self, x, nbr):
        for a, b in zip(self.own, self.nbr):
            agg = x[nbr].mean(1)
            x = F.relu(a(x) + b(agg))
        return x


def main():
    st = stage.Stage()
    dev = st.device
    nodes, d = st.pick(32768, 128), st.pick(1024, 16)
    store = NodeStore(st.pick(800, 100))
    st.closers.append(lambda: shutil.rmtree(store.root, ignore_errors=True))
    mixer = EdgeMixer(st.pick(20_000_000, 20_000), 64, dev)
    net = Sage(d, 3).to(dev).to(torch.bfloat16)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(nodes, d, device=dev, dtype=torch.bfloat16)
    nbr = torch.randint(0, nodes, (nodes, 5), device=dev)
    stage.background(lambda: [time.sleep(0.2) for _ in iter(int, 1)], "remote-sampler")
    trace = []

    def fit():
        store.pull()
        bonus = mixer.mix()
        out = net(x, nbr)
        loss = out.float().pow(2).mean() + bonus * 1e-6
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        trace.append(loss.item())
        del trace[:-100]

    def turn_a(a):
        store.want = int(a)

    def turn_b(a):
        mixer.edges = int(a)

    knobs = [stage.Knob("io", "NodeStore.pull", turn_a, st.pick(200, 20), "pair", alt="main.fit"),
             stage.Knob("device_memory_bandwidth", "EdgeMixer.mix", turn_b, st.pick(2_000_000, 2000), "pair",
                        alt="main.fit", top=st.pick(20_000_000, 20_000))]
    st.perform(fit, knobs)


if __name__ == "__main__":
    main()
