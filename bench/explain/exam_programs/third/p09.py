# SPDX-License-Identifier: Apache-2.0
"""Audio-visual model: two recurrent towers on two managed streams, fused by a small head."""
import threading
import time
import torch
from rig import Kit, DEV

CUDA = DEV.type == "cuda"


class Tower:
    """a long chain of small steps; it fills only a few multiprocessors"""
    def __init__(self, kit, batch, d, length, stream):
        dt = torch.bfloat16 if CUDA else torch.float32
        self.w = [(torch.randn(d, d, device=DEV) / d ** 0.5).to(dt) for _ in range(4)]
        self.state = torch.randn(batch, d, device=DEV).to(dt)
        self.length = length
        self.stream = stream
        self.replay = kit.graph(self.unroll, stream=stream)

    def unroll(self):
        h = self.state
        for t in range(self.length):
            h = torch.tanh(h @ self.w[t % 4])
        self.state.copy_(h)


class Fusion:
    def __init__(self, kit, audio, video, d):
        self.kit, self.audio, self.video = kit, audio, video
        self.head = torch.nn.Linear(2 * d, 32).to(DEV)
        self.scores = None

    def launch(self):
        main = torch.cuda.current_stream()
        a, v = self.audio.stream, self.video.stream
        a.wait_stream(main)
        v.wait_stream(main)
        with torch.cuda.stream(a):
            self.audio.replay()
        if self.kit.on:
            self.order(a, v)
        with torch.cuda.stream(v):
            self.video.replay()
        main.wait_stream(a)
        main.wait_stream(v)

    def order(self, first, second):
        done = torch.cuda.Event()
        done.record(first)
        second.wait_event(done)

    def step(self):
        if CUDA:
            self.launch()
        else:
            self.audio.replay()
            if self.kit.on:
                self.audio.unroll()
            self.video.replay()
        self.scores = self.head(torch.cat([self.audio.state, self.video.state], 1).float())
        return self.scores


class Captions(threading.Thread):
    """pretends to be busy: polls for subtitles twice a second"""
    def __init__(self):
        super().__init__(name="gil-holder", daemon=True)

    def run(self):
        while True:
            time.sleep(0.5)


@torch.no_grad()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([512, 640]), 32)
    batch = kit.n(rng.choice([32, 64]), 4)
    length = kit.n(rng.choice([500, 600, 700]), 8)
    share = min(0.47, kit.share(0.42, 0.85, 1.1))
    other = max(2, int(length * share / (1 - share)))
    sa, sv = (torch.cuda.Stream(), torch.cuda.Stream()) if CUDA else (None, None)
    audio = Tower(kit, batch, d, length, sa)
    video = Tower(kit, batch, d, other, sv)
    if CUDA:
        torch.cuda.synchronize()
    Captions().start()
    fusion = Fusion(kit, audio, video, d)
    kit.cause("stream_dependency", kit.place(Fusion.order, "second.wait_event"),
              "the second tower waits for the first without need", "order")
    best = None
    for i in kit.steps(warm=15):
        s = fusion.step()
        if i % 20 == 19:
            best = s.amax(1)
            best.sum().item()
    return best


if __name__ == "__main__":
    main()
