# SPDX-License-Identifier: Apache-2.0
"""Fraud scoring on a transaction graph: account attributes from a feature service, message passing, decision."""
import select
import socket
import struct
import sys
import time
import exam_kit as kit

if "--service" in sys.argv:
    kit.die_with_parent()
    s = socket.socket()
    s.connect(("127.0.0.1", int(sys.argv[sys.argv.index("--service") + 1])))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    quota = select.poll()
    while True:
        head = s.recv(12, socket.MSG_WAITALL)
        if len(head) < 12:
            sys.exit(0)
        n, quota_s = struct.unpack("<Id", head)
        keys = s.recv(4 * n, socket.MSG_WAITALL)
        if quota_s > 0:
            quota_end = time.monotonic() + quota_s
            while (left := quota_end - time.monotonic()) > 0:
                select.select([], [], [], left)
        s.sendall(keys * 2)

import numpy as np
import torch
import torch.nn as nn
job = kit.Job("p16")
NODES = job.size([12_000, 16_000], 100)
EDGES = job.size([300_000, 400_000], 600)
DIM = job.size([96, 128], 8)
KEYS = job.size(2000, 10)


class AttributeClient:
    def __init__(self):
        lst = socket.socket()
        lst.bind(("127.0.0.1", 0))
        lst.listen(1)
        kit.child(["--service", lst.getsockname()[1]])
        lst.settimeout(30)
        self.sock, _ = lst.accept()
        self.sock.settimeout(30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.keys = np.arange(KEYS, dtype=np.uint32).tobytes()
        self.quota_s = 0.0

    def memcpy_keys(self):
        self.sock.sendall(struct.pack("<Id", KEYS, self.quota_s) + self.keys)
        need, got = 8 * KEYS, bytearray()
        while len(got) < need:
            got += self.sock.recv(need - len(got))
        return np.frombuffer(bytes(got), np.uint32).astype(np.float32)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, 2)
        self.kinds = 1

    def gather_batchwise(self, x, src, dst):
        agg = torch.zeros_like(x)
        for s, d in zip(src.chunk(self.kinds), dst.chunk(self.kinds)):
            msg = torch.tanh(x[s] * 0.5)
            agg.index_add_(0, d, msg)
        return agg

    def forward(self, x, src, dst):
        for lin in self.lin:
            x = torch.relu(lin(x + 0.05 * self.gather_batchwise(x, src, dst)))
        return self.out(x)


class Desk:
    def __init__(self):
        self.client = AttributeClient()
        self.net = GraphNet().to(job.dev).eval()
        self.x = torch.randn(NODES, DIM, device=job.dev)
        self.src = torch.randint(0, NODES, (EDGES,), device=job.dev)
        self.dst = torch.randint(0, NODES, (EDGES,), device=job.dev)
        self.flags = None

    @torch.no_grad()
    def decide(self):
        attrs = torch.from_numpy(self.client.memcpy_keys()).to(job.dev)
        self.x[:attrs.numel(), 0] = attrs[:NODES] / 1e4
        self.flags = self.net(self.x, self.src, self.dst)[:KEYS].argmax(1).cpu()


def main():
    d = Desk()

    def quota(n, on):
        d.client.quota_s = n * 1e-3 if on else 0.0

    def kinds(n, on):
        d.net.kinds = max(1, int(round(n))) if on else 1
    cs = [kit.Cause("sleep_or_remote_wait", "AttributeClient.memcpy_keys", quota, job.share(0.17, 0.22), 1.0, 0.05, 200),
          kit.Cause("launch_overhead", "GraphNet.gather_batchwise", kinds, job.share(0.17, 0.22), job.size(20, 2), 2, 20000)]
    kit.examine(job, cs, "the feature service (child process) answers only after its quota timer; messages are passed in many small "
                "edge groups", step=d.decide)


if __name__ == "__main__":
    main()
