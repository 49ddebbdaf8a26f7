# SPDX-License-Identifier: Apache-2.0
"""HTTP scoring server with dynamic batching; clients run in a child process."""
import http.client
import json
import sys
import threading
import time


def client(port, size):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps([0.5] * size).encode()
    while True:
        c.request("POST", "/score", body, {"Content-Type": "application/json"})
        c.getresponse().read()


if "--clients" in sys.argv:
    at = sys.argv.index("--clients")
    for _ in range(int(sys.argv[at + 2])):
        threading.Thread(target=client, args=(int(sys.argv[at + 1]), int(sys.argv[at + 3])), daemon=True).start()
    sys.stdin.read()                            # ends with the server
    sys.exit(0)

import http.server
import queue
import subprocess
import torch
from rig import Kit, Net, DEV


class Batcher(threading.Thread):
    def __init__(self, net, d, target):
        super().__init__(name="cuda-sync", daemon=True)
        self.net, self.d, self.target = net, d, target
        self.inbox = queue.Queue()
        self.window = 0.0
        self.answered = 0
        self.batches = 0

    def collect(self):
        """waits until the batch is full, or the window is over"""
        batch = [self.inbox.get()]
        end = time.perf_counter() + self.window
        while len(batch) < self.target:
            left = end - time.perf_counter()
            try:
                batch.append(self.inbox.get(timeout=left) if left > 0 else self.inbox.get_nowait())
            except queue.Empty:
                if left <= 0:
                    break
        return batch

    @torch.no_grad()
    def run(self):
        while True:
            batch = self.collect()
            x = torch.tensor([b[0] for b in batch], device=DEV)
            x = x.repeat_interleave(max(1, 2048 // len(batch) if DEV.type == "cuda" else 1), 0)
            y = self.net(x)[:, 0].tolist()
            for k, (_, box) in enumerate(batch):
                box.put(y[k])
            self.answered += len(batch)
            self.batches += 1


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    batcher = None

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        box = queue.SimpleQueue()
        self.batcher.inbox.put((row, box))
        out = json.dumps({"score": box.get()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *a):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([768, 1024]), 16)
    people = kit.n(rng.choice([6, 8, 10]), 3)
    net = Net(d, kit.n(rng.choice([8, 10, 12]), 1), 4).to(DEV).eval()
    batcher = Batcher(net, d, 64)
    Handler.batcher = batcher
    server = Server(("127.0.0.1", 0), Handler)
    batcher.start()
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    kit.child(subprocess.Popen([sys.executable, __file__, "--clients", str(server.server_port), str(people), str(d)],
                               stdin=subprocess.PIPE))
    limit = time.time() + 20
    while batcher.answered < 50 and time.time() < limit:
        time.sleep(0.05)
    n, t = batcher.answered, time.perf_counter()
    time.sleep(kit.n(2.0, 0.3))
    rate = max(1.0, (batcher.answered - n) / (time.perf_counter() - t))
    share = kit.share(0.66, 0.92, 1.1)
    window = people / rate * share / (1 - share)

    def watch():                               # the window follows the phase
        while True:
            batcher.window = window if kit.on else 0.0
            time.sleep(0.01)

    threading.Thread(target=watch, name="config-reload", daemon=True).start()
    kit.cause("sleep_or_remote_wait", kit.place(Batcher.collect, "self.inbox.get(timeout=left)"),
              "the batch target is above the number of clients, so that each batch waits for its window", "Batcher")
    kit.clock(lambda: batcher.answered)


if __name__ == "__main__":
    main()
