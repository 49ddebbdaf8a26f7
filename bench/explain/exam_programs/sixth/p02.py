# SPDX-License-Identifier: Apache-2.0
"""Streaming speech recogniser: chunks of several callers through a small recurrent transducer, greedy decoding."""
import json
import threading
import torch
import torch.nn as nn
import exam_kit as kit

job = kit.Job("p02")
CALLERS = job.size([48, 64, 96], 4)
FRAMES = job.size([12, 16], 3)
HID = job.size([512, 640], 16)
SYMS = job.size(1024, 20)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(80, HID, 3, padding=1)
        self.cells = nn.ModuleList(nn.GRUCell(HID, HID) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(HID) for _ in range(3))
        self.head = nn.Linear(HID, SYMS)

    def forward(self, feats, state):
        x = torch.relu(self.front(feats)).transpose(1, 2)
        out = []
        for t in range(x.shape[1]):
            h = x[:, t]
            for k, (cell, norm) in enumerate(zip(self.cells, self.norms)):
                state[k] = cell(h, state[k])
                h = norm(h + state[k])
            out.append(h)
        return self.head(torch.stack(out, 1)), state


class CallBoard:
    """Dashboards of the call centre: word statistics per caller."""

    def __init__(self):
        self.lines = [json.dumps({"caller": i % CALLERS, "words": [f"w{(i * 7 + j) % 97}" for j in range(12)]})
                      for i in range(256)]
        self.stats = {}
        self.burst = 0
        self.stop = threading.Event()
        self.pos = 0
        self.thread = threading.Thread(target=self.nvml_poll, name="cuda-stream-flush", daemon=True)
        self.thread.start()

    def nvml_poll(self):
        while not self.stop.wait(0.003):
            if self.burst:
                self.tally(self.burst)

    def tally(self, count):
        for _ in range(count):
            rec = json.loads(self.lines[self.pos % len(self.lines)])
            self.pos += 1
            per = self.stats.setdefault(rec["caller"], {})
            for w in rec["words"]:
                per[w] = per.get(w, 0) + 1

    def close(self):
        self.stop.set()
        self.thread.join(2)


class Recogniser:
    def __init__(self):
        self.net = Encoder().to(job.dev).eval()
        self.state = [torch.zeros(CALLERS, HID, device=job.dev) for _ in range(3)]
        self.feats = torch.randn(6, CALLERS, 80, FRAMES, device=job.dev)
        self.text = [[] for _ in range(CALLERS)]
        self.k = 0

    @torch.no_grad()
    def chunk(self):
        logits, self.state = self.net(self.feats[self.k % 6], self.state)
        self.k += 1
        for t, syms in zip(self.text, logits.argmax(-1).tolist()):
            t.extend(s for s in syms if s)
            del t[:-200]


def main():
    rec, board = Recogniser(), CallBoard()
    kit.on_close(board.close)

    def rate(n, on):
        board.burst = max(1, int(n)) if on else 0
    c = kit.Cause("gil", "CallBoard.tally", rate, job.share(0.23, 0.31), 60, 1, 4000)
    kit.examine(job, [c], "a dashboard thread parses JSON in pure Python in bursts and keeps the interpreter lock from the "
                "launching thread (Recogniser.chunk / Encoder.forward)", step=rec.chunk, window=0.6)


if __name__ == "__main__":
    main()
