# SPDX-License-Identifier: Apache-2.0
"""Text generation; a helper thread turns token ids into text while the next token is computed."""
import queue
import threading
import time

import stage
import torch
from torch import nn
from torch.nn import functional as F


class Detokenizer(threading.Thread):
    def __init__(self):
        super().__init__(name="io-flush", daemon=True)
        self.inbox = queue.SimpleQueue()
        self.pieces = ["tok%d" % i for i in range(997)]
        self.merges = 0
        self.text = ""

    def run(self):
        while True:
            ids = self.inbox.get()
            if self.merges:
                self.text = self.join(ids, self.merges)

    def join(self, ids, merges):
        out, carry = [], 0
        for k in range(merges):
            carry = (carry * 33 + ids[k % len(ids)]) % 997
            piece = self.pieces[carry]
            if piece[-1] != "7":
                out.append(piece)
            if len(out) > 512:
                del out[:256]
        return "".join(out)


class Generator:
    def __init__(self, opts):
        s = opts.smoke
        self.d, self.n, b = (32, 2, 4) if s else (4096, 12, 2048)
        dt = torch.float32 if s else torch.bfloat16
        d = self.d
        self.blocks = [(torch.randn(d, 3 * d, device=opts.device, dtype=dt) * d ** -0.5,
                        torch.randn(3 * d, d, device=opts.device, dtype=dt) * d ** -0.5) for _ in range(self.n)]
        self.embed = torch.randn(997, d, device=opts.device, dtype=dt)
        self.tok = torch.randint(0, 997, (b,), device=opts.device)
        self.detok = Detokenizer()
        self.detok.start()

    @torch.inference_mode()
    def token(self):
        x = F.embedding(self.tok, self.embed)
        for up, down in self.blocks:
            h = F.silu(F.layer_norm(x, (self.d,)) @ up)
            x = x + h @ down
        self.tok = (F.layer_norm(x, (self.d,)) @ self.embed.t()).argmax(-1)
        self.detok.inbox.put(self.tok.tolist())

    def set_merges(self, x):
        self.detok.merges = int(x)


def main():
    opts = stage.options()
    torch.manual_seed(opts.seed)
    g = Generator(opts)
    threading.Thread(target=time.sleep, args=(1e6,), name="gil-holder", daemon=True).start()
    stage.conduct(opts, g.token, [
        stage.Factor("gil", "Detokenizer.join", "Generator.token", g.set_merges, 4000.0),
    ], "middle", settle=4)


if __name__ == "__main__":
    main()
