# SPDX-License-Identifier: Apache-2.0
"""Recommendation ranking: candidate rows come from a shelf service on this host, scores from a wide-and-deep model."""
from stage import Cell, Dial, arguments, conduct, spawn, tie_to_parent

import socket
import struct
import sys
import time


def read_exactly(sock, size):
    parts = bytearray()
    while len(parts) < size:
        piece = sock.recv(size - len(parts))
        if not piece:
            raise ConnectionError("peer left")
        parts += piece
    return bytes(parts)


def fetch_gradients(sock, delay, row):
    """One question: a count; one answer: that many rows."""
    count, = struct.unpack("!I", read_exactly(sock, 4))
    time.sleep(delay.get())
    sock.sendall(row * count)


def shelf(port_path, delay_path):
    tie_to_parent()
    port, delay = Cell(port_path), Cell(delay_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.set(server.getsockname()[1])
        sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            fetch_gradients(sock, delay, struct.pack("16f", *range(16)))


if "--shelf" in sys.argv:
    shelf(*sys.argv[2:4])
    sys.exit()

import torch
from torch import nn


class Catalogue:
    def __init__(self, delay):
        port = Cell()
        spawn("--shelf", port.path, delay.path)
        while not port.get():
            time.sleep(0.01)
        self.sock = socket.create_connection(("127.0.0.1", int(port.get())))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def normalise(self, count):
        self.sock.sendall(struct.pack("!I", count))
        raw = read_exactly(self.sock, count * 64)
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(count, 16)


class Ranker(nn.Module):
    def __init__(self, items, dim, width):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.deep = nn.Sequential(nn.Linear(dim + 16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                  nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids, rows, users):
        side = rows.repeat(ids.numel() // rows.shape[0], 1)
        return self.deep(torch.cat([self.items(ids) + users, side], 1)).flatten()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    delay = Cell()
    catalogue = Catalogue(delay)
    items, dim, width, candidates, asked = (200, 8, 32, 128, 16) if args.smoke else (500_000, 128, 2048, 32768, 256)
    model = Ranker(items, dim, width).to(args.device).eval()
    user = torch.randn(dim, device=args.device)

    @torch.no_grad()
    def request():
        rows = catalogue.normalise(asked).to(args.device)
        ids = torch.randint(items, (candidates,), device=args.device)
        return model(ids, rows, user).topk(10).indices.tolist()

    dial = Dial(0.004 if args.smoke else 0.012, hi=0.6, listen=delay.set)
    conduct(args, request, [dial], settle=3)


if __name__ == "__main__":
    main()
