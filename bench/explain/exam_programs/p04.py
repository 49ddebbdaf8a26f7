# SPDX-License-Identifier: Apache-2.0
"""Async recommendation server: each request batch needs user profiles from an HTTP service."""
import asyncio, http.server, json, os, signal, subprocess, sys, time
import torch
from runkit import Kit, Net, DEV, die_with_parent


def profile_service(delay):
    die_with_parent()

    class H(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            if self.path.startswith("/slow"):
                time.sleep(delay[0])
            elif self.path.startswith("/set"):
                delay[0] = float(self.path.split("=")[1])
            b = json.dumps({"u": [1, 2, 3]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(b)))
            self.end_headers()
            self.wfile.write(b)

        def log_message(self, *a):
            pass
    srv = http.server.ThreadingHTTPServer(("127.0.0.1", 0), H)
    print(srv.server_address[1], flush=True)
    srv.serve_forever()


async def fetch_profiles(conn, path):
    r, w = conn
    w.write(("GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path).encode())
    head = await r.readuntil(b"\r\n\r\n")
    n = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return json.loads(await r.readexactly(n))


async def serve(kit, port, pid):
    conn = await asyncio.open_connection("127.0.0.1", port)
    net = Net(kit.n(2048, 32), kit.n(12, 1)).to(DEV).eval()
    x = torch.randn(kit.n(kit.rng.choice([1024, 2048]), 4), kit.n(2048, 32), device=DEV)

    @torch.no_grad()
    def score():
        return net(x).sum(1).cpu().argmax().item()

    base, _ = kit.measure(score)
    s = kit.share(0.58, 0.85, 1.2)
    await fetch_profiles(conn, "/set=%f" % (base * s / (1 - s)))
    kit.cause("sleep_or_remote_wait", kit.place(fetch_profiles, "readuntil"), "awaits a late profile service", "pid %d (p04.py --service)" % pid)
    for it in kit.steps():
        if kit.on:
            await fetch_profiles(conn, "/slow")
        score()
        await asyncio.sleep(0)


def flags(ap):
    ap.add_argument("--service", action="store_true")


if __name__ == "__main__":
    if "--service" in sys.argv:
        signal.alarm(3600)
        profile_service([0.0])
    else:
        kit = Kit(__file__, flags)
        child = kit.child(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--service"], stdout=subprocess.PIPE, text=True))
        asyncio.run(serve(kit, int(child.stdout.readline()), child.pid))
