# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training, two processes on one card over gloo."""
import os, socket, subprocess, sys, time
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import numpy as np, torch
import torch.distributed as dist
from runkit import Kit, Net, DEV, die_with_parent


def augment(a, seconds):
    t = time.perf_counter()
    while time.perf_counter() - t < seconds:
        np.sort(a, axis=1)


def build(d, rows):
    torch.manual_seed(0)
    net = Net(d, 8 if d > 100 else 1).to(DEV)
    return net, torch.optim.SGD(net.parameters(), 1e-4), torch.randn(rows, d, device=DEV)


def step(net, opt, x):
    loss = net(x).square().mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    ps = list(net.head.parameters())
    flat = torch.cat([p.grad.flatten() for p in ps]).cpu()
    dist.all_reduce(flat)
    flat = (flat / 2).to(DEV)
    k = 0
    for p in ps:
        p.grad.copy_(flat[k:k + p.numel()].view_as(p))
        k += p.numel()
    opt.step()


def join(rank, port):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=2)


def worker(port, d, rows):
    die_with_parent()
    join(1, port)
    net, opt, x = build(d, rows)
    a = np.random.default_rng(0).random((64, 2000))
    order = torch.zeros(1, dtype=torch.float64)
    while True:
        dist.broadcast(order, 0)
        augment(a, order.item())
        step(net, opt, x)


def main(kit):
    d, rows = kit.n(1024, 32), kit.n(kit.rng.choice([1024, 2048]), 8)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    child = kit.child(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", str(port), str(d), str(rows)]))
    join(0, port)
    net, opt, x = build(d, rows)

    def together(delay=0.0):
        dist.broadcast(torch.tensor([delay], dtype=torch.float64), 0)
        step(net, opt, x)

    base, _ = kit.measure(together)
    s = kit.share(0.4)
    delay = base * s / (1 - s)
    kit.cause("straggler_rank", kit.place(augment, "np.sort"), "rank 1 augments on the CPU before its step; rank 0 waits in all_reduce", "pid %d (rank 1)" % child.pid)
    for it in kit.steps():
        together(delay if kit.on else 0.0)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(*map(int, sys.argv[sys.argv.index("--worker") + 1:][:3]))
    else:
        main(Kit(__file__))
