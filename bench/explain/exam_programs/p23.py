# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning update with environment processes on the same few cores."""
import multiprocessing as mp, os, signal
import torch
from runkit import Kit, Net, DEV, die_with_parent


def environment(cores):
    die_with_parent()
    os.sched_setaffinity(0, cores)
    x = 1
    while True:
        x = (x * 1103515245 + 12345) % 2147483648


def main(kit):
    cores = sorted(os.sched_getaffinity(0))[:2]
    ctx = mp.get_context("fork")
    envs = [ctx.Process(target=environment, args=(cores,), name="env-%d" % k, daemon=True) for k in range(kit.rng.choice([3, 4, 5]))]
    for p in envs:
        p.start()
        kit.child(p)
        os.kill(p.pid, signal.SIGSTOP)
    torch.set_num_threads(1)
    d = kit.n(256, 16)
    net = Net(d, kit.n(10, 1)).to(DEV)
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    x = torch.randn(kit.n(256, 8), d, device=DEV)
    for t in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(t), cores)
        except OSError:
            pass
    kit.cause("cpu_starvation", None, "%d busy processes share the %d cores of the trainer" % (len(envs), len(cores)), "pids " + ",".join(str(p.pid) for p in envs) + " (environment)")
    running = False
    for it in kit.steps():
        if kit.on != running:
            running = kit.on
            for p in envs:
                os.kill(p.pid, signal.SIGCONT if running else signal.SIGSTOP)
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 10 == 9:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
