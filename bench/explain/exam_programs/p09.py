# SPDX-License-Identifier: Apache-2.0
"""Language-model-like training with periodic checkpoints."""
import os, tempfile
import torch
from runkit import Kit, Net, DEV


def save(net, opt, path):
    with open(path + ".tmp", "wb") as f:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(6, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    x = torch.randn(kit.n(kit.rng.choice([2048, 4096]), 8), d, device=DEV)
    folder = tempfile.mkdtemp(prefix="run_")
    path = os.path.join(folder, "last.pt")

    def step():
        loss = (net(x) - x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss

    base, _ = kit.measure(step)
    s = kit.share(0.3)
    cost = kit.unit(lambda: save(net, opt, path), 2)
    every = max(1, round(cost / (base * s / (1 - s))))
    kit.cause("io", kit.place(save, "torch.save"), "checkpoint with fsync every %d steps" % every)
    import shutil
    kit.at_end.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    count = 0
    for it in kit.steps():
        loss = step()
        count += 1
        if count % 25 == 0:
            loss.item()
        if count % every == 0 and kit.on:
            save(net, opt, path)


if __name__ == "__main__":
    main(Kit(__file__))
