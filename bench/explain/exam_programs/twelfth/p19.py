# SPDX-License-Identifier: Apache-2.0
"""Ranking of shop items; item facts come from the catalog's own server."""
import stage
import http.client
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse


class Shelf(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        ask = parse_qs(urlparse(self.path).query)
        effort = float(ask.get("effort", ["0"])[0])
        if effort > 0:
            time.sleep(effort * 1e-5)
        body = json.dumps({"facts": [len(self.path) % 7] * 16}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def shelf_server(path):
    stage.tie_to_parent()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    with open(path + ".part", "w") as f:
        f.write(str(server.server_port))
    os.rename(path + ".part", path)
    server.serve_forever()


class Catalog:
    def __init__(self, port, effort):
        self.port, self.effort, self.local = port, effort, threading.local()

    def fetch(self, shard):
        link = getattr(self.local, "link", None)
        if link is None:
            link = self.local.link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        link.request("GET", f"/shard/{shard}?effort={self.effort():.3f}")
        return json.loads(link.getresponse().read())["facts"]


class Ranker:
    def __init__(self, args, catalog, shards=3):
        import torch
        from torch import nn
        self.torch, self.dev, tiny = torch, args.device, args.smoke
        torch.manual_seed(args.seed)
        kind = torch.float32 if tiny else torch.bfloat16
        dim, depth, rows = (64, 2, 64) if tiny else (4096, 8, 16384)
        self.tower = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(dim, dim), nn.GELU())]).to(self.dev, kind)
        self.items = torch.randn(rows, dim, device=self.dev, dtype=kind)
        self.catalog, self.shards = catalog, shards
        self.pool = ThreadPoolExecutor(shards, thread_name_prefix="gpu-copy")

    def gather(self):
        asked = [self.pool.submit(self.catalog.fetch, k) for k in range(self.shards)]
        return [x for job in asked for x in job.result()]

    def rank(self):
        facts = self.torch.tensor(self.gather(), dtype=self.items.dtype).to(self.dev)
        scores = self.tower(self.items).sum(1) + facts.mean()
        return scores.topk(10).indices.cpu().tolist()


def main():
    if "--shelf" in sys.argv:
        return shelf_server(sys.argv[sys.argv.index("--shelf") + 1])
    args = stage.arguments()
    note = os.path.join(stage.scratch_dir(), "port")
    stage.spawn("--shelf", note)
    while not os.path.exists(note):
        time.sleep(0.02)
    effort = stage.Dial(600)
    ranker = Ranker(args, Catalog(int(open(note).read()), effort))
    with ranker.torch.inference_mode():
        stage.conduct(args, ranker.rank, [effort])


if __name__ == "__main__":
    main()
