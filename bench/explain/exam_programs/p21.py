# SPDX-License-Identifier: Apache-2.0
"""Matrix-heavy training on a shared card."""
import os, signal, subprocess, sys, time
import torch
from runkit import Kit, Net, DEV, die_with_parent, sync


def tenant(work, rest):
    die_with_parent()
    parent, born = os.getppid(), time.time()
    n = 4096 if DEV.type == "cuda" else 64
    a = torch.randn(n, n, device=DEV)
    b = torch.mm(a, a)
    sync()
    print("up", flush=True)
    while os.getppid() == parent and time.time() - born < 3600:
        t = time.perf_counter()
        while time.perf_counter() - t < work:
            for _ in range(2):
                torch.mm(a, a, out=b)
            sync()
        time.sleep(rest)


def main(kit, work, rest, note):
    me = os.path.abspath(__file__)
    child = kit.child(subprocess.Popen([sys.executable, me, "--tenant", str(work), str(rest)], stdout=subprocess.PIPE, text=True))
    if child.stdout.readline().strip() != "up":
        raise RuntimeError("second process did not start")
    os.kill(child.pid, signal.SIGSTOP)
    d = kit.n(2048, 32)
    net = Net(d, kit.n(8, 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 1e-4)
    x = torch.randn(kit.n(kit.rng.choice([2048, 4096]), 8), d, device=DEV)
    kit.cause("gpu_cotenant", None, note, "pid %d (p21.py --tenant)" % child.pid)
    running = False
    for it in kit.steps():
        if kit.on != running:
            running = kit.on
            os.kill(child.pid, signal.SIGCONT if running else signal.SIGSTOP)
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 4 == 3:
            loss.item()


def flags(ap):
    ap.add_argument("--tenant", nargs=2, type=float)


if __name__ == "__main__":
    if "--tenant" in sys.argv:
        i = sys.argv.index("--tenant")
        tenant(float(sys.argv[i + 1]), float(sys.argv[i + 2]))
    else:
        kit = Kit(__file__, flags)
        main(kit, kit.rng.uniform(0.2, 0.4), kit.rng.uniform(0.0, 0.03), "steady second process on the same GPU")
