# SPDX-License-Identifier: Apache-2.0
"""Nearest-passage retrieval with a second opinion from a catalogue service."""
import http.client, http.server, json, subprocess, sys, threading, time
import torch
from rig import Kit, DEV, die_with_parent


class Catalogue(http.server.BaseHTTPRequestHandler):
    protocol_version, delay = "HTTP/1.1", 0.01

    def do_GET(self):
        time.sleep(self.delay)
        body = json.dumps({"path": self.path, "rank": list(range(8))}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *a):
        pass


def catalogue():
    die_with_parent()
    Catalogue.delay = float(sys.argv[2])
    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Catalogue)
    print(s.server_port, flush=True)
    s.serve_forever()


def merge(link, ids):
    link.request("GET", "/m/" + "-".join(map(str, ids[:8])))
    answer = link.getresponse().read()
    return json.loads(answer)["rank"]


def main(kit):
    n, d, bs = kit.n(kit.rng.choice([1_000_000, 2_000_000]), 1000), kit.n(256, 16), kit.n(256, 4)
    dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
    base_vec = torch.randn(n, d, device=DEV, dtype=dt)
    proj = torch.randn(d, d, device=DEV, dtype=dt)

    def find():
        q = torch.randn(bs, d, device=DEV, dtype=dt) @ proj
        best = [(q @ part.T).topk(8) for part in base_vec.chunk(8)]
        v = torch.cat([b.values for b in best], 1).topk(8).indices
        return v[0].tolist()

    base, _ = kit.measure(find)
    every, s = kit.rng.choice([8, 12, 20]), kit.share(0.22)
    p = kit.child(subprocess.Popen([sys.executable, __file__, "--catalogue", str(every * base * s / (1 - s))],
                                   stdout=subprocess.PIPE, text=True))
    link = http.client.HTTPConnection("127.0.0.1", int(p.stdout.readline()))
    threading.Thread(target=threading.Event().wait, name="fsync", daemon=True).start()
    kit.cause("sleep_or_remote_wait", kit.place(merge, "getresponse()"), "every %d steps an HTTP answer is awaited" % every, p.pid)
    for it in kit.steps():
        ids = find()
        if kit.on and it % every == every - 1:
            merge(link, ids)


if __name__ == "__main__":
    catalogue() if "--catalogue" in sys.argv else main(Kit(__file__))
