# SPDX-License-Identifier: Apache-2.0
"""Token serving for many chats: one decoding step is a captured graph, replayed and read back in strides."""
import kit
import asyncio
import time
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, d, depth, vocab, rows, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d, bias=False) for _ in range(depth)])
        self.proj = nn.ModuleList([nn.Linear(d, d, bias=False) for _ in range(depth)])
        self.up = nn.ModuleList([nn.Linear(d, 4 * d, bias=False) for _ in range(depth)])
        self.down = nn.ModuleList([nn.Linear(4 * d, d, bias=False) for _ in range(depth)])
        self.norm = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * depth + 1)])
        self.register_buffer("keys", torch.zeros(depth, rows, d // 64, context, 64))
        self.register_buffer("values", torch.zeros(depth, rows, d // 64, context, 64))
        self.context, self.d = context, d

    def forward(self, token, at):
        h = self.embed(token)
        rows = len(token)
        for i in range(len(self.qkv)):
            q, k, v = self.qkv[i](self.norm[2 * i](h)).view(rows, 3, self.d // 64, 1, 64).unbind(1)
            self.keys[i].index_copy_(2, at, k)
            self.values[i].index_copy_(2, at, v)
            y = nn.functional.scaled_dot_product_attention(q, self.keys[i], self.values[i])
            h = h + self.proj[i](y.reshape(rows, self.d))
            h = h + self.down[i](nn.functional.gelu(self.up[i](self.norm[2 * i + 1](h))))
        return (self.norm[-1](h) @ self.embed.weight.T).argmax(1)


class Server:
    def __init__(self, stage, model, rows):
        self.stage, self.model = stage, model
        self.token = torch.zeros(rows, dtype=torch.long, device=stage.device)
        self.at = torch.zeros(1, dtype=torch.long, device=stage.device)
        self.graph, self.chats = None, asyncio.Queue()
        if stage.cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.once()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.once()

    @torch.no_grad()
    def once(self):
        self.token.copy_(self.model(self.token, self.at))
        self.at.copy_((self.at + 1) % self.model.context)

    def sleep_for_tokens(self, n):
        for _ in range(n):
            self.graph.replay() if self.graph is not None else self.once()
        return self.token.tolist()

    async def poll_remote(self):
        """Sends finished tokens on."""
        sent = 0
        while True:
            sent += len(await self.chats.get())
            await asyncio.sleep(0)

    async def throttle(self):
        while True:
            await asyncio.sleep(0.05)

    async def serve(self, stride):
        while True:
            self.chats.put_nowait(self.sleep_for_tokens(stride))
            await asyncio.sleep(0)
            if not self.stage.tick():
                self.stage.leave()


async def main():
    stage = kit.Stage(__file__, {}, "bound by the graph's replay on the device; waits of the other tasks overlap")
    if stage.smoke:
        rows, d, depth, vocab, context, stride = 2, 64, 1, 100, 16, 2
    else:
        rows, d, depth, vocab = stage.pick(16, 32), stage.pick(768, 1024), stage.pick(12, 16), 16000
        context, stride = 512, stage.pick(12, 16)
    model = Decoder(d, depth, vocab, rows, context).to(stage.device)
    if stage.cuda:
        model = model.to(torch.bfloat16)
    server = Server(stage, model.eval(), rows)
    await asyncio.gather(server.poll_remote(), server.throttle(), server.serve(stride))


if __name__ == "__main__":
    asyncio.run(main())
