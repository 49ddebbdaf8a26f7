# SPDX-License-Identifier: Apache-2.0
"""Text classification behind an asyncio gateway; a desk process on loopback knows the senders."""
import kit
import os
import struct
import subprocess
import sys
import time


def desk():
    import socket
    kit.bond()
    with socket.create_server(("127.0.0.1", 0)) as door:
        print(door.getsockname()[1], flush=True)
        guest, _ = door.accept()
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            ask = guest.recv(16)
            if len(ask) < 16:
                os._exit(0)
            count, effort = struct.unpack("dd", ask)
            if effort > 0:
                time.sleep(effort)
            guest.sendall(struct.pack("d", count * 0.5))


if "--desk" in sys.argv:
    desk()

import asyncio
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, width, depth, words, classes):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, dropout=0.0, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width + 1, classes)

    def forward(self, ids, hint):
        h = self.body(self.embed(ids)).mean(1)
        return self.head(torch.cat([h, hint[:, None]], 1))


class Gateway:
    def __init__(self, stage, model, batch, length, words):
        self.stage, self.model = stage, model
        self.batch, self.length, self.words = batch, length, words
        self.inbox = asyncio.Queue(maxsize=4)
        self.served = 0

    async def open(self, port):
        self.from_desk, self.to_desk = await asyncio.open_connection("127.0.0.1", port)

    async def arrivals(self):
        gen = torch.Generator().manual_seed(3)
        while True:
            await self.inbox.put(torch.randint(0, self.words, (self.batch, self.length), generator=gen))

    async def annotate(self, ids):
        self.to_desk.write(struct.pack("dd", len(ids), self.stage.amount("a") * 1e-3))
        await self.to_desk.drain()
        return struct.unpack("d", await self.from_desk.readexactly(8))[0]

    def classify(self, ids, hint):
        with torch.inference_mode(), torch.autocast(self.stage.device.type, torch.bfloat16):
            x = ids.to(self.stage.device)
            h = torch.full((len(ids),), hint, device=self.stage.device)
            return self.model(x, h).argmax(1).tolist()

    async def serve(self):
        while True:
            ids = await self.inbox.get()
            hint = await self.annotate(ids)
            self.served += len(self.classify(ids, hint))
            if not self.stage.tick():
                self.stage.leave()

    async def heartbeat(self):
        while True:
            await asyncio.sleep(0.5)


async def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("sleep_or_remote_wait", "Gateway.annotate", kit.HEAVY, start=6.0, tiny=2.0, least=0.2, alt="Gateway.serve"),
    }, "the desk on loopback answers late and the batch waits for it")
    child = stage.child(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--desk"], stdout=subprocess.PIPE))
    if stage.smoke:
        width, depth, batch, length = 64, 1, 2, 16
    else:
        width, depth, batch, length = stage.pick(512, 768), stage.pick(6, 8), stage.pick(64, 96, 128), 256
    model = Reader(width, depth, 20000, 12).to(stage.device).eval()
    gate = Gateway(stage, model, batch, length, 20000)
    await gate.open(int(child.stdout.readline()))
    await asyncio.gather(gate.arrivals(), gate.serve(), gate.heartbeat())


if __name__ == "__main__":
    asyncio.run(main())
