# SPDX-License-Identifier: Apache-2.0
"""Ranking service: candidate features come from a store on this host, scores from a deep model."""
import http.client
import http.server
import json
import sys
import threading
import time

import stage


def serve_store(opts):
    stage.tie_to_parent()
    dial = stage.Dial(opts.arg)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            lag = dial[0]
            if lag > 0:
                time.sleep(lag)
            n = int(self.path.rsplit("/", 1)[1]) % 97
            body = json.dumps({"ids": [(n * k) % 5003 for k in range(64)]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *a):
            pass

    srv = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    srv.daemon_threads = True
    print(srv.server_address[1], flush=True)
    srv.serve_forever()


class FeatureClient:
    def __init__(self, port):
        self.conn = http.client.HTTPConnection("127.0.0.1", port)
        self.turn = 0

    def lookup(self):
        self.turn += 1
        self.conn.request("GET", "/user/%d" % self.turn)
        return json.loads(self.conn.getresponse().read())["ids"]


def main():
    opts = stage.options()
    if opts.role == "store":
        return serve_store(opts)
    dial = stage.Dial()
    proc = stage.child("store", dial.path, opts, pipe=True)
    import torch
    from torch import nn
    d, rows = (16, 64) if opts.smoke else (2048, 65536)
    dev = opts.device
    table = nn.EmbeddingBag(5003, d, device=dev, mode="mean")
    dtype = torch.float32 if opts.smoke else torch.bfloat16
    tower = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(d, d), nn.SiLU())], nn.Linear(d, 1)).to(dev, dtype)
    items = torch.randn(rows, d, device=dev, dtype=dtype)
    client = FeatureClient(int(proc.stdout.readline()))
    ranked = []

    def cache_refresher():
        spare = 0
        while True:
            time.sleep(0.02)
            spare = (spare * 31 + 7) % 1009

    threading.Thread(target=cache_refresher, name="compute-bound-worker", daemon=True).start()

    @torch.inference_mode()
    def rank():
        ids = torch.tensor([client.lookup()], device=dev)
        user = table(ids).to(dtype)
        best = tower(items * user).squeeze(1).topk(8).indices
        ranked[:] = best.tolist()

    def knob(x):
        dial[0] = x

    stage.conduct(opts, rank, [
        stage.Factor("sleep_or_remote_wait", "FeatureClient.lookup", "rank", knob, 0.001),
    ], "middle")


if __name__ == "__main__":
    sys.exit(main())
