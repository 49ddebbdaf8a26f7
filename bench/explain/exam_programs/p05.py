# SPDX-License-Identifier: Apache-2.0
"""Speech features from a reader process over a queue; trainer polls the queue."""
import multiprocessing as mp, queue, time
import numpy as np, torch
from runkit import Kit, Net, DEV, die_with_parent


def spectrum(wave):
    return np.abs(np.fft.rfft(wave, axis=1))


def reader(q, rows, dim, need, parent):
    die_with_parent()
    rng = np.random.default_rng(0)
    wave = rng.standard_normal((rows, dim * 2 - 2))
    while True:
        t = time.perf_counter()
        while True:
            f = spectrum(wave)
            if time.perf_counter() - t >= need:
                break
        q.put(np.ascontiguousarray(f[:, :dim], np.float32))


def next_features(q):
    while True:
        try:
            return q.get_nowait()
        except queue.Empty:
            time.sleep(0.001)


def main(kit):
    dim, rows = kit.n(1024, 32), kit.n(kit.rng.choice([256, 512]), 8)
    net = Net(dim, kit.n(14, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=True)
    kept = torch.rand(rows, dim, device=DEV)

    def learn(x):
        loss = (net(x) - x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    base, _ = kit.measure(lambda: learn(kept))
    s = kit.share(0.35)
    q = mp.get_context("fork").Queue(3)
    p = mp.get_context("fork").Process(target=reader, args=(q, rows, dim, base / (1 - s), 0), name="reader", daemon=True)
    p.start()
    kit.child(p)
    kit.cause("input_pipeline", kit.place(next_features, "time.sleep"), "one reader process computes features too slowly; trainer polls with sleeps", "pid %d (reader; spectrum)" % p.pid)
    for it in kit.steps():
        learn(torch.from_numpy(next_features(q)).to(DEV) if kit.on else kept)


if __name__ == "__main__":
    main(Kit(__file__))
