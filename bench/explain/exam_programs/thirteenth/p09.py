# SPDX-License-Identifier: Apache-2.0
"""Molecular dynamics: all-pairs forces of a solvent box, rigid fragments re-centred after each move."""
from stage import Dial, arguments, conduct

import torch


def make_box(atoms, size, device, seed):
    gen = torch.Generator().manual_seed(seed)
    place = torch.rand(atoms, 3, generator=gen) * size
    return place.to(device), torch.zeros(atoms, 3, device=device), torch.zeros(atoms, 3, device=device)


def forces(place, out, block):
    energy = place.new_zeros(())
    for rows, part in zip(place.split(block), out.split(block)):
        apart = torch.cdist(rows, place).add_(0.5)
        pull = apart.pow(-7).sub_(apart.pow(-4)).clamp_(-50, 50)
        torch.mm(pull, place, out=part)
        part.sub_(rows * pull.sum(1, keepdim=True)).mul_(-1e-5)
        energy += apart.reciprocal_().sum()
    return energy


def gather_statistics(fragments, rests, count):
    """Pull the first fragments back onto their rest shape."""
    for k in range(count):
        piece = fragments[k]
        centre = piece.mean(0, keepdim=True)
        offset = piece - centre
        offset.lerp_(rests[k], 0.1)
        piece.copy_(offset + centre)


def parallel(fragments, rests):
    centre = fragments.mean(1, keepdim=True)
    fragments.sub_(centre).lerp_(rests, 0.1).add_(centre)


def simulation(device, atoms, per_fragment, block, seed, amount):
    place, speed, pull = make_box(atoms, 40.0, device, seed)
    fragments = place.view(-1, per_fragment, 3)
    rests = fragments - fragments.mean(1, keepdim=True)
    while True:
        alone = min(amount(), fragments.shape[0])
        gather_statistics(fragments, rests, alone)
        parallel(fragments[alone:], rests[alone:])
        for _ in range(2):
            energy = forces(place, pull, block)
            speed.mul_(0.99).add_(pull, alpha=1e-3)
            place.add_(speed, alpha=1e-3)
        yield energy.item()


def main():
    args = arguments()
    dial = Dial(200, hi=2000, whole=True)
    with torch.no_grad():
        if args.smoke:
            run = simulation(args.device, 512, 8, 256, args.seed, dial)
            dial.value, dial.hi = 12, 60
        else:
            run = simulation(args.device, 16384, 8, 8192, args.seed, dial)
        conduct(args, lambda: next(run), [dial])


if __name__ == "__main__":
    main()
