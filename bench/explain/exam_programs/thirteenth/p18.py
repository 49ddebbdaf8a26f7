# SPDX-License-Identifier: Apache-2.0
"""Radio correlator: station voltages to channels, station pairs to visibilities, a quick-look sheet for the operator."""
from stage import Dial, arguments, conduct

import torch


def channelise(volts, taps, channels):
    stations, samples = volts.shape
    frames = volts.view(stations, samples // channels, channels) * taps
    return torch.fft.fft(frames, dim=2)


def correlate(spectra):
    by_channel = spectra.permute(2, 0, 1).contiguous()
    return torch.bmm(by_channel, by_channel.conj().transpose(1, 2))


def compress_history(sheet, spectra, count):
    """Keep the newest spectra for the operator."""
    if count:
        flat = torch.view_as_real(spectra).flatten()
        count = min(count, sheet.numel(), flat.numel())
        sheet[:count].copy_(flat[:count])
    return count


def observe(device, stations, samples, channels, seed, amount):
    gen = torch.Generator(device).manual_seed(seed)
    shape = (stations, samples)
    volts = torch.complex(torch.randn(shape, device=device, generator=gen), torch.randn(shape, device=device, generator=gen))
    taps = torch.hann_window(channels, device=device)
    sheet = torch.zeros(2 * stations * samples).fill_(1.0)
    total = torch.zeros(channels, stations, stations, dtype=torch.complex64, device=device)
    kept = 0
    while True:
        for _ in range(2):
            spectra = channelise(volts, taps, channels)
            total.mul_(0.9).add_(correlate(spectra))
        kept += compress_history(sheet, spectra, amount())
        yield total[0, 0, 0].real.item(), kept


def main():
    args = arguments()
    size = (8, 4096, 64) if args.smoke else (96, 1 << 20, 4096)
    dial = Dial(20_000 if args.smoke else 12_000_000, hi=2 * size[0] * size[1], whole=True)
    with torch.no_grad():
        run = observe(args.device, *size, args.seed, dial)
        conduct(args, lambda: next(run), [dial])


if __name__ == "__main__":
    main()
