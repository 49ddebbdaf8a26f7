# SPDX-License-Identifier: Apache-2.0
"""Weather emulator: station reports are merged on the host, a spectral network advances the global field one frame."""
import random

from stage import Dial, arguments, conduct

import torch


def parse_stations(reports, count, merged):
    for k in range(count):
        place, value, weight = reports[k % len(reports)]
        old = merged.get(place)
        if old is None:
            merged[place] = (value * weight, weight)
        else:
            merged[place] = ((old[0] * 0.9 + value * weight), old[1] * 0.9 + weight)
    return merged


class Climatology:
    def __init__(self, size, device, amount):
        self.year = torch.zeros(size).fill_(0.5)
        self.today = torch.zeros(size, device=device)
        self.amount = amount

    def interpolate(self):
        count = self.amount()
        if count:
            self.today[:count].copy_(self.year[:count])
        return self.today[:1]


class Emulator:
    def __init__(self, fields, rows, columns, layers, device, seed):
        gen = torch.Generator(device).manual_seed(seed)
        self.field = torch.randn(fields, rows, columns, device=device, generator=gen)
        real = lambda: torch.randn(fields, fields, rows, device=device, generator=gen) / fields
        self.mix = [torch.complex(real(), real()) for _ in range(layers)]

    def advance(self, shift):
        x = self.field
        for mix in self.mix:
            spectrum = torch.fft.rfft2(x)
            spectrum = torch.einsum("oir,irc->orc", mix, spectrum)
            x = torch.tanh(torch.fft.irfft2(spectrum, s=x.shape[1:]) + x + shift)
        self.field = x
        return x.mean()


def main():
    args = arguments()
    rng = random.Random(args.seed)
    sizes = (4, 32, 64, 1) if args.smoke else (128, 512, 1024, 6)
    model = Emulator(*sizes, args.device, args.seed)
    table = 4_000_000 if args.smoke else 100_000_000
    cells, lines = Dial(50_000 if args.smoke else 5_000_000, hi=table, whole=True), \
        Dial(2_000 if args.smoke else 30_000, hi=5_000_000, whole=True)
    base = Climatology(table, args.device, cells)
    reports = [(rng.randrange(3000), rng.gauss(10, 5), rng.random()) for _ in range(5000)]
    merged = parse_stations(reports, 100, {})

    @torch.no_grad()
    def frame():
        parse_stations(reports, lines(), merged)
        shift = base.interpolate() * 1e-3
        return model.advance(shift).item()

    conduct(args, frame, [cells, lines])


if __name__ == "__main__":
    main()
