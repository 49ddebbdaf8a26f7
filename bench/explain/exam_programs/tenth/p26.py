# SPDX-License-Identifier: Apache-2.0
"""Translation by beam search: terms are looked up at a terminology service, hypotheses are extended on the device."""
import http.client
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import stage


class Terms(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self):
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        end = time.perf_counter() + ask["depth"] * 1e-6
        while end - time.perf_counter() > 0:
            time.sleep(max(0.0, min(1e-3, end - time.perf_counter())))
        body = json.dumps({"terms": [w % 7 for w in ask["words"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *a):
        pass


class Glossary:
    def __init__(self, port):
        self.conn, self.depth = http.client.HTTPConnection("127.0.0.1", port), 0

    def lookup(self, words):
        self.conn.request("POST", "/", json.dumps({"words": words, "depth": self.depth}))
        return json.loads(self.conn.getresponse().read())["terms"]


def main():
    import torch
    import torch.nn.functional as F
    from torch import nn
    st = stage.Stage()
    kid = stage.child(__file__, "--role", "terms", stdout=stage.subprocess.PIPE, stdin=stage.subprocess.DEVNULL)
    glossary = Glossary(int(kid.stdout.readline()))
    dev, dt = st.device, torch.bfloat16
    d, batch, length = st.pick(1024, 32), st.pick(64, 2), st.pick(256, 16)
    encoder = nn.Sequential(*[nn.TransformerEncoderLayer(d, st.pick(16, 2), 4 * d, 0.0, F.gelu, batch_first=True)
                              for _ in range(st.pick(10, 1))]).to(dev, dt).train()
    text = torch.randn(batch, length, d, device=dev, dtype=dt)
    table = torch.randn(512, 128, device=dev)

    class Beam:
        def __init__(self):
            self.rounds = 0
            self.state = torch.randn(8, 128, device=dev)

        def expand(self, start):
            h, score = self.state, start
            for _ in range(self.rounds):
                logits = h @ table.T
                best = logits.argmax(-1)
                h = torch.tanh(h + table[best] * 0.1)
                score = score + logits.amax(-1).mean()
            return h, score

    beam = Beam()
    stage.background(lambda: [time.sleep(0.2) for _ in iter(int, 1)], "beam-lock-timer")
    last = [list(range(8))]

    def translate():
        with torch.no_grad():
            terms = glossary.lookup(last[0])
            memory = encoder(text)
            keep = memory[:, -1].float().mean(1).topk(min(8, batch)).indices.tolist()
            h, score = beam.expand(memory.new_zeros((), dtype=torch.float32) + sum(terms))
            last[0] = [int(v) for v in h[:, :1].abs().mul(100).flatten().tolist()]
        return keep, score

    def turn_a(a):
        glossary.depth = int(a)

    def turn_b(a):
        beam.rounds = int(a)

    knobs = [stage.Knob("sleep_or_remote_wait", "Glossary.lookup", turn_a, 2500, "pair", alt="Terms.do_POST"),
             stage.Knob("launch_overhead", "main.Beam.expand", turn_b, st.pick(60, 10), "pair", alt="main.translate")]
    st.perform(translate, knobs)


if __name__ == "__main__":
    if "terms" in sys.argv:
        stage.tether()
        server = HTTPServer(("127.0.0.1", 0), Terms)
        print(server.server_address[1], flush=True)
        server.serve_forever()
    else:
        main()
