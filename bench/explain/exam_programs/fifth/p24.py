# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Session-based recommendation: profile vectors come from a small feature service on localhost."""
import json
import socket
import socketserver
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


# ---- the feature service (another process) ------------------------------------------------------
class ProfileHandler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self):
        for raw in self.rfile:
            ask = json.loads(raw)
            if ask["tier"] > 0:
                time.sleep(ask["tier"] * 1e-6)
            reply = {"ids": [(u * 2654435761) % 4096 for u in ask["users"]]}
            self.wfile.write((json.dumps(reply) + "\n").encode())
            self.wfile.flush()


def profile_service():
    bk.die_with_parent()
    with socketserver.TCPServer(("127.0.0.1", 0), ProfileHandler) as srv:
        print(srv.server_address[1], flush=True)
        srv.handle_request()


# ---- the client side ---------------------------------------------------------------------------
class ProfileClient:
    def __init__(self, port):
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.sock.makefile("r")
        self.tier = 0

    def fetch(self, users):
        self.sock.sendall((json.dumps({"users": users, "tier": self.tier}) + "\n").encode())
        return json.loads(self.file.readline())["ids"]

    def close(self):
        self.file.close()
        self.sock.close()


class SessionNet(nn.Module):
    def __init__(self, items, d, layers):
        super().__init__()
        self.item = nn.Embedding(items, d)
        self.profile = nn.Embedding(4096, d)
        self.gru = nn.GRU(d, d, layers, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(2 * d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, clicks, prof):
        h, _ = self.gru(self.item(clicks))
        z = self.mix(torch.cat([h[:, -1], self.profile(prof)], -1))
        return z @ self.item.weight.t()


class SessionServer:
    def __init__(self, o, client):
        items, d, layers, b, t = (200, 16, 1, 8, 5) if o.smoke else (60_000, 512, 2, o.rng.choice([1536, 2048]), 24)
        self.o, self.client, self.b = o, client, b
        self.net = SessionNet(items, d, layers).to(o.device)
        if o.gpu:
            self.net = self.net.to(torch.float16)
        self.net.eval()
        self.clicks = [torch.randint(0, items, (b, t), device=o.device) for _ in range(4)]
        self.users = np.random.default_rng(o.seed).integers(0, 1 << 30, (4, 64)).tolist()
        self.i = 0

    @torch.no_grad()
    def gpu_wait_round(self):
        k = self.i % 4
        self.i += 1
        ids = torch.tensor(self.client.fetch(self.users[k]))
        prof = ids.repeat(self.b // len(ids) + 1)[: self.b].to(self.o.device)
        best = self.net(self.clicks[k], prof).float().topk(10, dim=-1)
        self.top = best.indices.cpu()


def main():
    o = bk.options()
    if o.role == "profiles":
        return profile_service()
    share = o.rng.uniform(0.10, 0.18)
    child = bk.launch(__file__, "profiles", o)
    try:
        s = SessionServer(o, None)
        client = s.client = ProfileClient(int(child.stdout.readline()))
        bk.mean_step(s.gpu_wait_round, 0.1 if o.smoke else 1.0, o.device)
        base = bk.mean_step(s.gpu_wait_round, o.probe, o.device)

        def measure(us):
            client.tier = us
            return bk.mean_step(s.gpu_wait_round, o.probe, o.device)

        us = bk.tune(measure, base, share, max(1, int(1e6 * base * share)), 60_000, tol=0.02)
        on, off = bk.two_phases(s.gpu_wait_round, o, lambda: setattr(client, "tier", us),
                                lambda: setattr(client, "tier", 0))
        client.close()
    finally:
        bk.stop(child)
    bk.truth(on, off, "sleep_or_remote_wait", "ProfileClient.fetch",
             f"the feature service answers {us} microseconds late, each step waits for it")


if __name__ == "__main__":
    sys.exit(main())
