# SPDX-License-Identifier: Apache-2.0
"""Speech assistant back end (asyncio): every turn asks the tenant's policy server, then decodes on the device."""
import asyncio, json, sys
import exam_kit
from exam_kit import Cause


class PolicyServer:
    """A neighbour's service: answers in batches on its own tick."""

    async def client(self, rd, wr):
        while True:
            line = await rd.readline()
            if not line:
                break
            q = json.loads(line)
            await asyncio.sleep(q["tick_us"] * 1e-6)
            wr.write(json.dumps({"tenant": q["tenant"], "allow": list(range(0, 64, 2))}).encode() + b"\n")
            await wr.drain()

    async def serve(self):
        s = await asyncio.start_server(self.client, "127.0.0.1", 0)
        print(s.sockets[0].getsockname()[1], flush=True)
        await s.serve_forever()


class Assistant:
    def __init__(self, rng, smoke, dev):
        import subprocess
        import torch
        self.torch = torch
        self.dev = dev
        self.b = 4 if smoke else rng.choice([256, 384])
        d = 32 if smoke else rng.choice([4096, 5120])
        self.layers = [(torch.randn(d, d, device=dev) / d ** 0.5) for _ in range(6)]
        self.out = torch.randn(d, 64, device=dev)
        self.h = torch.randn(self.b, d, device=dev)
        self.server = exam_kit.spawn(__file__, "--role", "policy", stdout=subprocess.PIPE, text=True)
        self.port = int(self.server.stdout.readline())
        self.loop = asyncio.new_event_loop()
        self.rd, self.wr = self.loop.run_until_complete(asyncio.open_connection("127.0.0.1", self.port))
        self.known = {}
        self.words = 2 if smoke else 14
        self.tick_us = 0
        self.always_ask = False
        self.tenant = 0
        self.causes = [Cause("sleep_or_remote_wait", "Assistant.build_mask_tensor", self.set_tick, 4000, 50, 200000, integer=True)]

    def set_tick(self, a, on):
        self.tick_us = int(a)
        self.always_ask = on

    async def build_mask_tensor(self, tenant):
        self.wr.write(json.dumps({"tenant": tenant, "tick_us": self.tick_us}).encode() + b"\n")
        ans = json.loads(await self.rd.readline())
        self.known[tenant] = ans["allow"]
        return ans["allow"]

    async def turn(self):
        torch = self.torch
        self.tenant = (self.tenant + 1) % 8
        allow = None if self.always_ask else self.known.get(self.tenant)
        if allow is None:
            allow = await self.build_mask_tensor(self.tenant)
        with torch.no_grad():
            mask = torch.full((64,), -1e9, device=self.dev)
            mask[torch.tensor(allow).to(self.dev)] = 0
            said = []
            for _ in range(self.words):
                h = self.h
                for w in self.layers:
                    h = torch.tanh(h @ w)
                self.h = 0.5 * self.h + 0.5 * h
                said.append((h @ self.out + mask).argmax(1))
            return torch.stack(said).tolist()

    def step(self):
        return self.loop.run_until_complete(self.turn())

    def close(self):
        self.wr.close()


if __name__ == "__main__":
    if "--role" in sys.argv:
        exam_kit.die_with_parent()
        asyncio.run(PolicyServer().serve())
    else:
        exam_kit.main(Assistant, "low", "the tenant's policy is asked for at every turn though it is known; the remote answers on a slow tick")
