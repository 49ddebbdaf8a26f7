# SPDX-License-Identifier: Apache-2.0
"""Chat server: sessions come and go in slots of a continuous batch, one decoding step for all slots at a time."""
import asyncio
import gc
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p18")
SLOTS = job.size([24, 32, 48], 4)
DIM = job.size([768, 1024], 16)
LAYERS = job.size([10, 12], 2)
CTX = job.size([192, 256], 16)
VOCAB = job.size(16000, 60)
DT = torch.bfloat16 if job.cuda else torch.float32


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.norm = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS))
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))
        self.proj = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(DIM, 4 * DIM) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * DIM, DIM) for _ in range(LAYERS))
        self.register_buffer("kv", torch.zeros(LAYERS, 2, SLOTS, 8, CTX, DIM // 8))

    def forward(self, tok, pos):
        x = self.emb(tok)
        for i in range(LAYERS):
            q, k, v = self.qkv[i](self.norm[2 * i](x)).view(SLOTS, 3, 8, 1, -1).unbind(1)
            self.kv[i, 0, :, :, pos:pos + 1] = k
            self.kv[i, 1, :, :, pos:pos + 1] = v
            a = F.scaled_dot_product_attention(q, self.kv[i, 0], self.kv[i, 1])
            x = x + self.proj[i](a.reshape(SLOTS, DIM))
            x = x + self.down[i](F.gelu(self.up[i](self.norm[2 * i + 1](x))))
        return (x @ self.emb.weight.t()).argmax(1)


class Session:
    def __init__(self, sid):
        self.sid, self.turns, self.done = sid, [], None
        self.me = self

    def say(self, tok):
        self.turns.append({"tok": tok})


class ChatServer:
    def __init__(self):
        self.net = Decoder().to(job.dev, DT).eval()
        self.sessions = [Session(i) for i in range(SLOTS)]
        self.tok = torch.zeros(SLOTS, dtype=torch.long, device=job.dev)
        gc.collect()
        gc.freeze()
        self.history = [{"sid": i, "turns": [i, [i]]} for i in range(20_000 if not job.smoke else 200)]
        self.n = 0
        self.goodbye_rate, self.ticks = 0.0, kit.Ticks()
        self.loop = asyncio.new_event_loop()

    def flush_to_socket(self, slot):
        self.sessions[slot] = Session(self.n)
        gc.collect()

    async def tick(self):
        with torch.no_grad():
            self.tok = self.net(self.tok, self.n % CTX)
        for s, t in zip(self.sessions, self.tok.tolist()):
            s.say(t)
            del s.turns[:-CTX]
        self.n += 1
        for _ in range(self.ticks.take(self.goodbye_rate)):
            self.flush_to_socket(self.n % SLOTS)
        await asyncio.sleep(0)

    async def heartbeat(self):
        while True:
            await asyncio.sleep(0.5)

    async def serve(self, seconds):
        hb = asyncio.ensure_future(self.heartbeat())
        job.sync()
        t0, k = time.perf_counter(), 0
        while time.perf_counter() - t0 < seconds or k < 2:
            await self.tick()
            k += 1
        job.sync()
        ms = (time.perf_counter() - t0) * 1e3 / k
        hb.cancel()
        return ms


def main():
    srv = ChatServer()
    kit.on_close(gc.unfreeze)

    def rate(n, on):
        srv.goodbye_rate = n if on else 0.0
    c = kit.Cause("gc", "ChatServer.flush_to_socket", rate, job.share(0.14, 0.18), 0.1, 0.001, 40)
    kit.examine(job, [c], "a full garbage collection whenever a session ends", window=1.0, tries=5,
                measure=lambda sec: srv.loop.run_until_complete(srv.serve(sec)))


if __name__ == "__main__":
    main()
