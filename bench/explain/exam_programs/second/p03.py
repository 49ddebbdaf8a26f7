# SPDX-License-Identifier: Apache-2.0
"""Defect inspection: image batches from workers, mixed precision."""
import threading
import numpy as np, torch
from torch.utils.data import Dataset, DataLoader
from rig import Kit, ConvNet, DEV


class Plates(Dataset):
    def __init__(self, side):
        self.a = np.random.default_rng(3).integers(0, 255, (32, 3, side, side), dtype=np.uint8)

    def __len__(self):
        return 20_000_000

    def __getitem__(self, i):
        return self.a[i % 32], i % 8


def main(kit):
    torch.set_num_threads(2)
    side, bs = kit.n(128, 16), kit.n(kit.rng.choice([128, 192, 256]), 4)
    net = ConvNet(kit.n(192, 8), kit.n(10, 1), 8).to(DEV).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), 0.01, foreach=True)
    feed = iter(DataLoader(Plates(side), batch_size=bs, num_workers=kit.n(6, 1), prefetch_factor=4,
                           pin_memory=DEV.type == "cuda"))
    for k in feed._workers:
        kit.child(k)
    threading.Thread(target=threading.Event().wait, name="gc-sweeper", daemon=True).start()
    kit.cause("healthy", None, "nothing was put in; device-bound")
    for it in kit.steps():
        x, y = next(feed)
        x, y = x.to(DEV, non_blocking=True), y.to(DEV, non_blocking=True)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(DEV.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(x.float().div_(255)), y)
        loss.backward()
        opt.step()
        if it % 100 == 99:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
