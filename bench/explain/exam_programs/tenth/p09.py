# SPDX-License-Identifier: Apache-2.0
"""Ranking service on asyncio: candidate vectors come from a profile service, scores go back to the caller."""
import asyncio
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import stage


def serve_profiles():
    """The profile service: answers after it has read the requested number of replicas."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_GET(self):
            quorum = float(self.path.rsplit("=", 1)[1])
            if quorum > 0:
                time.sleep(quorum * 1e-6)
            body = struct.pack("64f", *[0.01 * i for i in range(64)])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *a):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


class ProfileClient:
    def __init__(self, port):
        self.port, self.quorum, self.pipe = port, 0, None

    async def fetch(self, user):
        if self.pipe is None:
            self.pipe = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.pipe
        writer.write(f"GET /profile/{user}?q={self.quorum} HTTP/1.1\r\nHost: profiles\r\n\r\n".encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return struct.unpack("64f", await reader.readexactly(size))


def main():
    import torch
    from torch import nn
    st = stage.Stage()
    kid = stage.child(__file__, "--role", "profiles", stdout=stage.subprocess.PIPE, stdin=stage.subprocess.DEVNULL)
    client = ProfileClient(int(kid.stdout.readline()))
    dev = st.device
    d, n = st.pick(2048, 64), st.pick(32768, 64)
    net = nn.Sequential(*[m for _ in range(st.pick(20, 2)) for m in (nn.Linear(d, d), nn.GELU())], nn.Linear(d, 1))
    net = net.to(dev, torch.bfloat16)
    items = torch.randn(n, d, device=dev, dtype=torch.bfloat16)
    loop = asyncio.new_event_loop()
    counters = {"served": 0, "beats": 0}

    async def heartbeat():
        while True:
            counters["beats"] += 1
            await asyncio.sleep(0.05)

    async def handle():
        vec = await client.fetch(counters["served"])
        bias = torch.tensor(vec, dtype=torch.bfloat16).to(dev, non_blocking=True)
        with torch.no_grad():
            x = items.clone()
            x[:, :64] += bias
            best = net(x).squeeze(1).topk(10).indices
        counters["last"] = best.tolist()
        counters["served"] += 1

    beat = loop.create_task(heartbeat(), name="slow-gc-sweep")

    def request():
        loop.run_until_complete(handle())

    def turn(a):
        client.quorum = int(a)

    knob = stage.Knob("sleep_or_remote_wait", "ProfileClient.fetch", turn, 3000, "middle",
                      alt="serve_profiles.Handler.do_GET")
    st.perform(request, [knob])
    beat.cancel()


if __name__ == "__main__":
    if "profiles" in sys.argv:
        stage.tether()
        serve_profiles()
    else:
        main()
