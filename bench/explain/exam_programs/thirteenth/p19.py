# SPDX-License-Identifier: Apache-2.0
"""Speech-synthesis service: an event loop answers listeners, the vocoder runs as one replayed graph, two batches in flight."""
import asyncio
import collections
import threading
import time

from stage import arguments, conduct

import torch
import torch.nn as nn


class Vocoder:
    def __init__(self, device, channels, depth, batch, frames):
        self.gpu = device == "cuda"
        layers = [nn.Conv1d(80, channels, 7, padding=3)]
        for k in range(depth):
            layers += [nn.LeakyReLU(0.1), nn.Conv1d(channels, channels, 7, padding=3 * 3 ** (k % 3), dilation=3 ** (k % 3))]
        self.net = nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh()).to(device).eval()
        self.mel = torch.randn(batch, 80, frames, device=device)
        self.graph = None
        if self.gpu:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.net(self.mel)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=side):
                self.wave = self.net(self.mel)
            self.host = [torch.empty(batch, 64, pin_memory=True) for _ in range(3)]

    def wait_for_lock(self, slot):
        if not self.gpu:
            return self.net(self.mel)[:, 0, :64], None
        self.graph.replay()
        self.host[slot].copy_(self.wave[:, 0, :64], non_blocking=True)
        mark = torch.cuda.Event()
        mark.record()
        return self.host[slot], mark


class Service:
    def __init__(self, vocoder, batch):
        self.vocoder, self.batch = vocoder, batch
        self.flight, self.turn, self.heard = collections.deque(), 0, 0.0

    async def listener(self, answer):
        self.heard = float((await answer)[0])

    async def round(self):
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in range(self.batch)]
        people = [loop.create_task(self.listener(a)) for a in answers]
        self.flight.append((self.vocoder.wait_for_lock(self.turn % 3), answers, people))
        self.turn += 1
        if len(self.flight) > 2:
            (host, mark), answers, people = self.flight.popleft()
            if mark is not None:
                mark.synchronize()
            for answer, row in zip(answers, host):
                answer.set_result(row)
            await asyncio.gather(*people)


def retry_backoff(service, beats):
    while True:
        time.sleep(0.5)
        beats.append(service.turn)
        del beats[:-10]


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    channels, depth, batch, frames = (16, 2, 2, 128) if args.smoke else (256, 9, 16, 8192)
    loop = asyncio.new_event_loop()
    with torch.inference_mode():
        service = Service(Vocoder(args.device, channels, depth, batch, frames), batch)
        threading.Thread(target=retry_backoff, args=(service, []), name="throttle", daemon=True).start()
        conduct(args, lambda: loop.run_until_complete(service.round()))


if __name__ == "__main__":
    main()
