# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small photo classifier (bf16 autocast, DataLoader with worker processes)."""
import multiprocessing.util
import threading
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, default_collate
from rig import Kit, ConvNet, DEV


class PhotoFolder(Dataset):
    def __init__(self, length, side, rounds):
        self.length, self.side, self.rounds = length, side, rounds

    def __len__(self):
        return self.length

    def read(self, i):
        r = np.random.default_rng(i)
        row = r.integers(0, 255, (self.side, 1, 3), dtype=np.uint8)
        return np.ascontiguousarray(np.broadcast_to(row, (self.side, self.side, 3)))

    @staticmethod
    def tone_map(img, gain):
        f = img.astype(np.float32)
        f *= gain
        f += np.roll(f, 1, axis=0) * 0.05
        np.sqrt(f, out=f)
        f *= 15.9
        np.clip(f, 0, 255, out=f)
        return f.astype(np.uint8)

    def __getitem__(self, i):
        img = self.read(i)
        for k in range(self.rounds):
            img = self.tone_map(img, 0.9 + 0.01 * (k % 9))
        return torch.from_numpy(img).permute(2, 0, 1), i % 100


class Endless(torch.utils.data.Sampler):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        r = np.random.default_rng(self.seed)
        while True:
            yield int(r.integers(self.n))


def one_thread(_):
    torch.set_num_threads(1)


def main():
    kit = Kit(__file__)
    rng = kit.rng
    side = kit.n(rng.choice([128, 144, 160]), 24)
    batch = kit.n(rng.choice([64, 80, 96]), 4)
    workers = kit.n(rng.choice([3, 4]), 1)
    net = ConvNet(kit.n(128, 8), kit.n(rng.choice([5, 6, 7]), 1)).to(DEV).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    torch.backends.cudnn.benchmark = True
    share = kit.share(0.45)

    def update(x, y):
        x = x.to(DEV, non_blocking=True).float().div_(255).to(memory_format=torch.channels_last)
        y = y.to(DEV, non_blocking=True)
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    x = torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8)
    y = torch.randint(0, 100, (batch,))
    if DEV.type == "cuda":
        x, y = x.pin_memory(), y.pin_memory()
    base, _ = kit.measure(lambda: update(x, y))

    probe = PhotoFolder(1, side, 1)
    img = probe.read(0)
    unit = kit.unit(lambda: probe.tone_map(img, 0.95), 60)
    bare = PhotoFolder(1, side, 0)
    fixed = kit.unit(lambda: default_collate([bare[0] for _ in range(batch)]), 10) / batch
    per_sample = base / (1 - share) * workers / batch
    rounds = max(1, round((per_sample - fixed) / unit))
    data = PhotoFolder(20000, side, rounds)
    loader = DataLoader(data, batch, sampler=Endless(len(data), kit.args.seed), num_workers=workers,
                        pin_memory=DEV.type == "cuda", prefetch_factor=2, persistent_workers=True,
                        multiprocessing_context="spawn", worker_init_fn=one_thread)
    feed = iter(loader)
    for w in feed._workers:
        kit.child(w)
    memory = [next(feed) for _ in range(3)]

    def close():
        feed._shutdown_workers()
        multiprocessing.util._run_finalizers()

    kit.at_end.append(close)

    def heartbeat():                  # writes the "still alive" mark for the cluster manager
        while True:
            stop.wait(0.5)

    stop = threading.Event()
    threading.Thread(target=heartbeat, name="nccl-allreduce", daemon=True).start()

    kit.cause("input_pipeline", kit.place(PhotoFolder.__getitem__, "self.tone_map"),
              "too few workers for the per-sample augmentation", "DataLoader workers")
    for i in kit.steps(warm=14):
        x, y = next(feed) if kit.on else memory[i % 3]
        update(x, y)


if __name__ == "__main__":
    main()
