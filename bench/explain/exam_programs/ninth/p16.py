# SPDX-License-Identifier: Apache-2.0
"""Acoustic room simulation: second-order waves on a 3-d grid, microphones written by a thread of its own."""
import kit
import os
import queue
import tempfile
import threading
import torch


class Tape(threading.Thread):
    """Microphone samples to disk, synced; the simulation does not wait for it."""

    def __init__(self):
        super().__init__(name="fsync-per-step", daemon=True)
        self.inbox = queue.Queue()
        self.fd, self.path = tempfile.mkstemp(prefix="tape")

    def run(self):
        while True:
            block = self.inbox.get()
            os.pwrite(self.fd, block, 0)
            os.fsync(self.fd)


class Room:
    def __init__(self, device, n):
        self.now = torch.zeros(n, n, n, device=device)
        self.old = torch.zeros_like(self.now)
        self.new = torch.zeros_like(self.now)
        self.now[n // 2, n // 2, n // 2] = 1.0
        self.mics = torch.tensor([[n // 3, n // 4, n // 2], [n // 5, n // 2, n // 3]], device=device)

    def advance(self):
        u = self.now
        lap = self.new
        c = lap[1:-1, 1:-1, 1:-1]
        torch.mul(u[1:-1, 1:-1, 1:-1], -6.0, out=c)
        for d in range(3):
            for side in (0, 2):
                cut = [slice(1, -1)] * 3
                cut[d] = slice(side, u.shape[d] - 2 + side)
                c.add_(u[tuple(cut)])
        c.mul_(0.12).add_(u[1:-1, 1:-1, 1:-1], alpha=2.0).sub_(self.old[1:-1, 1:-1, 1:-1])
        self.old, self.now, self.new = self.now, lap, self.old

    def listen(self):
        a, b, c = self.mics.T
        return self.now[a, b, c]


def main():
    stage = kit.Stage(__file__, {}, "bound by the device's memory; the fsync is another thread's and hides entirely")
    n = stage.pick(384, 448, 512) if not stage.smoke else 24
    substeps = stage.pick(4, 6) if not stage.smoke else 2
    room = Room(stage.device, n)
    tape = Tape()
    stage.at_end(lambda: os.unlink(tape.path))
    tape.start()
    while True:
        sound = []
        for _ in range(substeps):
            room.advance()
            sound.append(room.listen())
        block = torch.stack(sound).cpu().numpy().tobytes()
        if tape.inbox.qsize() < 2:
            tape.inbox.put(block)
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
