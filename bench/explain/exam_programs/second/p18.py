# SPDX-License-Identifier: Apache-2.0
"""Tabular model; rows come from another process through a pipe."""
import multiprocessing as mp, queue, threading, time
import numpy as np, torch
from rig import Kit, Net, DEV, die_with_parent


def attic(pipe, bs, d, wait):
    """a far store: each answer takes a while"""
    die_with_parent()
    rows = np.random.default_rng(1).standard_normal((bs, d)).astype(np.float32)
    due = time.perf_counter()
    while True:
        due = max(due + wait, time.perf_counter())
        time.sleep(max(0, due - time.perf_counter()))
        pipe.send_bytes(rows)


def fetch(pipe, bs, d, out):
    while True:
        out.put(torch.from_numpy(np.frombuffer(pipe.recv_bytes(), np.float32).reshape(bs, d).copy()))


def beat(stop):
    n = 0
    while not stop.wait(0.02):
        n += 1


def main(kit):
    bs, d = kit.n(4096, 16), kit.n(kit.rng.choice([128, 192]), 8)
    net = torch.nn.Sequential(torch.nn.Linear(d, kit.n(1024, 16)), Net(kit.n(1024, 16), kit.n(6, 1), 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 1e-4)
    cached = [torch.randn(bs, d).to(DEV) for _ in range(3)]

    def fit(x):
        opt.zero_grad(set_to_none=True)
        net(x).square().mean().backward()
        opt.step()

    base, _ = kit.measure(lambda: fit(cached[0]))
    s, here = kit.share(0.24, 0.9, 1.15), mp.get_context("spawn").Pipe(False)
    p = mp.get_context("spawn").Process(target=attic, args=(here[1], bs, d, base / (1 - s)), name="cotenant", daemon=True)
    p.start()
    kit.child(p)
    q = queue.Queue(4)
    threading.Thread(target=fetch, args=(here[0], bs, d, q), name="scheduler", daemon=True).start()
    threading.Thread(target=beat, args=(threading.Event(),), name="loader", daemon=True).start()
    kit.cause("input_pipeline", kit.place(fetch, "pipe.recv_bytes"), "the far store answers too slowly", p.pid)
    kit.ablate.append(kit.wipe)
    for it in kit.steps():
        fit(q.get().to(DEV) if kit.on else cached[it % 3])


if __name__ == "__main__":
    main(Kit(__file__))
