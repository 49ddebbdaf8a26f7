# SPDX-License-Identifier: Apache-2.0
"""Language model on passages of growing length."""
import torch
import torch.nn.functional as F
from rig import Kit, DEV


def tidy():
    if DEV.type == "cuda":
        torch.cuda.empty_cache()


def turn(opt):
    opt.step()


def main(kit):
    d, depth, bs = kit.n(kit.rng.choice([512, 768]), 16), kit.n(kit.rng.choice([8, 10]), 1), kit.n(16, 2)
    net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(d, kit.n(8, 2), 4 * d, 0.0, batch_first=True), depth).to(DEV)
    head = torch.nn.Linear(d, kit.n(8000, 20)).to(DEV)
    ps = list(net.parameters()) + list(head.parameters())
    slow = torch.optim.Adam(ps, 1e-5, foreach=False)
    fast = torch.optim.Adam(ps, 1e-5, fused=True) if DEV.type == "cuda" else slow
    lengths = list(range(kit.n(96, 4), kit.n(352, 12), kit.n(16, 2)))
    every = kit.rng.choice([1, 2])
    kit.cause("allocator", kit.place(tidy, "empty_cache"), "cached blocks are given back every %d steps while shapes grow" % every)
    kit.cause("launch_overhead", kit.place(turn, "opt.step()"), "smaller cause: optimiser without foreach/fused")
    for it in kit.steps():
        n = lengths[it % len(lengths)]
        x = torch.randn(bs, n, d, device=DEV)
        y = torch.randint(0, head.out_features, (bs * n,), device=DEV)
        opt = slow if kit.on else fast
        with torch.autocast(DEV.type, torch.bfloat16):
            loss = F.cross_entropy(head(net(x)).flatten(0, 1).float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        turn(opt)
        if kit.on and it % every == 0:
            del loss, x
            tidy()


if __name__ == "__main__":
    main(Kit(__file__))
