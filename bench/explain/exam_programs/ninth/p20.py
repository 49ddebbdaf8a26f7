# SPDX-License-Identifier: Apache-2.0
"""MRI reconstruction: iterative soft thresholding in k-space, scans uploaded ahead on a stream of their own."""
import kit
import contextlib
import torch


class Lane:
    """A stream, or nothing on a host without one."""

    def __init__(self, stage):
        self.stream = torch.cuda.Stream() if stage.cuda else None

    def __enter__(self):
        self.inner = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        return self.inner.__enter__()

    def __exit__(self, *a):
        return self.inner.__exit__(*a)

    def mark(self):
        return self.stream.record_event() if self.stream else None


class Scanner:
    def __init__(self, stage, coils, side, rounds):
        d = stage.device
        self.stage, self.rounds = stage, rounds
        self.upload = Lane(stage)
        self.most = (96 << 20) if stage.cuda else 4096
        self.host = torch.zeros(self.most, pin_memory=stage.cuda)
        self.slots = [torch.zeros(self.most, device=d) for _ in range(2)]
        self.ready, self.free = [None, None], [None, None]
        self.mask = (torch.rand(side, side, device=d) < 0.4).float()
        self.k = torch.randn(coils, side, side, device=d, dtype=torch.complex64)
        self.image = torch.zeros(coils, side, side, device=d)
        self.turn = 0
        self.prefetch(0)

    def wait(self, event):
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def prefetch(self, slot):
        n = min(self.most, int(self.stage.size("a")))
        with self.upload:
            self.wait(self.free[slot])
            self.slots[slot][:n].copy_(self.host[:n], non_blocking=True)
            self.ready[slot] = self.upload.mark()

    def solve(self, slot):
        k = self.k + self.slots[slot][0]
        x = self.image * 0.0
        for _ in range(self.rounds):
            r = (torch.fft.fft2(x, norm="ortho") - k) * self.mask
            x = x - torch.fft.ifft2(r, norm="ortho").real
            x = torch.sign(x) * (x.abs() - 0.01).clamp(min=0)
        self.image = x

    def reconstruct(self):
        slot = self.turn % 2
        other = 1 - slot
        self.prefetch(other)
        self.wait(self.ready[slot])
        if self.stage.on("a"):
            self.wait(self.ready[other])
        self.solve(slot)
        if self.stage.cuda:
            self.free[slot] = torch.cuda.current_stream().record_event()
        self.turn += 1


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("stream_dependency", "Scanner.reconstruct", kit.MIDDLE, start=2e7, tiny=4000, least=1e5, most=96 << 20,
                      moving=True, alt="Scanner.wait"),
    }, "the computing stream waits for the upload of the scan after this one", settle=4)
    if stage.smoke:
        scanner = Scanner(stage, 2, 32, 2)
    else:
        scanner = Scanner(stage, stage.pick(12, 16), stage.pick(640, 768), stage.pick(8, 10, 12))
    shown = []
    while True:
        scanner.reconstruct()
        if scanner.turn % 8 == 0:
            shown.append(scanner.image.abs().mean().item())
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
