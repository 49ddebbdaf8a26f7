# SPDX-License-Identifier: Apache-2.0
"""Neural vocoder: a recurrent core makes audio frame by frame; the unrolled block is replayed as a captured graph."""
import threading
import torch
import torch.nn as nn
import exam_kit as kit

job = kit.Job("p12")
VOICES = job.size([256, 384, 512], 4)
HID = job.size([768, 1024], 16)
UNROLL = job.size([48, 64], 4)


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.wx = nn.Linear(HID, 3 * HID)
        self.wh = nn.Linear(HID, 3 * HID)
        self.out = nn.Linear(HID, HID)

    def forward(self, x, h):
        a, b = self.wx(x), self.wh(h)
        z = torch.sigmoid(a[:, :HID] + b[:, :HID])
        r = torch.sigmoid(a[:, HID:2 * HID] + b[:, HID:2 * HID])
        n = torch.tanh(a[:, 2 * HID:] + r * b[:, 2 * HID:])
        h = n + z * (h - n)
        return torch.tanh(self.out(h)), h


class RemoteMixer:
    """Sink of the audio; keeps the newest block. (Was remote once.)"""

    def __init__(self):
        self.lock = threading.RLock()
        self.block = None

    def send_and_wait(self, audio):
        with self.lock:
            self.block = audio


class TinyKernelVocoder:
    def __init__(self):
        self.core = Core().to(job.dev).eval()
        self.x = torch.randn(VOICES, HID, device=job.dev)
        self.h = torch.zeros(VOICES, HID, device=job.dev)
        self.audio = torch.zeros(UNROLL, VOICES, device=job.dev)
        self.mixer = RemoteMixer()
        self.graph = None
        self.n = 0
        if job.cuda:
            self.capture_again()

    def unrolled(self):
        x, h = self.x, self.h
        for t in range(UNROLL):
            x, h = self.core(x, h)
            self.audio[t].copy_(x[:, 0])
        self.x.copy_(x)
        self.h.copy_(h)

    def capture_again(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.unrolled()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.unrolled()

    @torch.no_grad()
    def sleepless_step(self):
        if self.graph is None:
            self.unrolled()
        else:
            self.graph.replay()
        self.n += 1
        if self.n % 16 == 0:
            self.mixer.send_and_wait(self.audio.cpu())


def main():
    with torch.no_grad():
        v = TinyKernelVocoder()
    kit.examine(job, [], "healthy: one captured graph of many short kernels, replayed back to back; the device is always busy "
                "and the audio is fetched only every 16 blocks", step=v.sleepless_step)


if __name__ == "__main__":
    main()
