# SPDX-License-Identifier: Apache-2.0
"""Fraud scoring: an asyncio loop fetches features from a feature server, then scores the batch."""
import asyncio
import struct
import subprocess
import sys
import torch
from rig import Kit, Net, DEV, die_with_parent


async def handle(reader, writer):
    """feature server, runs in a process of its own"""
    try:
        while True:
            delay, count = struct.unpack("!dI", await reader.readexactly(12))
            await asyncio.sleep(delay)
            writer.write(b"\x01" * (4 * count))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


class FeatureClient:
    def __init__(self, delay, count):
        self.delay, self.count = delay, count
        self.local = b"\x01" * (4 * count)

    async def connect(self, port):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def fetch(self):
        self.writer.write(struct.pack("!dI", self.delay, self.count))
        await self.writer.drain()
        return await self.reader.readexactly(4 * self.count)

    async def fetch_cached(self):
        return self.local


class Scorer:
    def __init__(self, d, depth, rows):
        self.net = Net(d, depth, 1).to(DEV).eval()
        self.x = torch.randn(rows, d, device=DEV)
        self.alerts = 0

    @torch.no_grad()
    def score(self, raw):
        bias = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: self.x.shape[1]].to(DEV).float()
        s = self.net(self.x + bias * 0.01).sigmoid()
        self.alerts += int((s > 0.9).sum().item())


def spin_lock(alerts):
    """formats the alert counter for the dashboard"""
    return "alerts=%d" % alerts


async def main():
    kit = Kit(__file__)
    rng = kit.rng
    server = kit.child(subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True))
    d = kit.n(rng.choice([1536, 2048]), 32)
    scorer = Scorer(d, kit.n(rng.choice([8, 10]), 1), kit.n(rng.choice([3072, 4096]), 8))
    client = FeatureClient(0.0, max(256, d))
    base, _ = kit.measure(lambda: scorer.score(client.local))
    share = kit.share(0.22)
    client.delay = max(0.0002, base * share / (1 - share) - 0.0008)
    port = int(server.stdout.readline())
    await client.connect(port)
    kit.cause("sleep_or_remote_wait", kit.place(FeatureClient.fetch, "readexactly"),
              "waits for the remote feature server in every batch", "feature server")
    board = ""
    for i in kit.steps(warm=12):
        raw = await (client.fetch() if kit.on else client.fetch_cached())
        scorer.score(raw)
        board = spin_lock(scorer.alerts)
    return board


if __name__ == "__main__":
    if "--serve" in sys.argv:
        die_with_parent()
        asyncio.run(serve())
    else:
        asyncio.run(main())
