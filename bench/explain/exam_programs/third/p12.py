# SPDX-License-Identifier: Apache-2.0
"""Ranking service (graph replay per request batch) beside a second service on the same device."""
import subprocess
import sys
import threading
import time
import torch
from rig import Kit, Net, DEV, die_with_parent, sync


def thumbnails(duty, size, seed):
    """second service: makes embeddings of pictures, in its own process"""
    die_with_parent()
    torch.manual_seed(seed)
    dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=DEV, dtype=dt)
    b = torch.randn(size, size, device=DEV, dtype=dt)
    c = a @ b
    sync()
    print("up", flush=True)
    sys.stdin.readline()
    while True:
        t = time.perf_counter()
        while time.perf_counter() - t < 0.08:
            for _ in range(4):
                torch.mm(a, b, out=c)
            sync()
        time.sleep(0.08 * (1 - duty) / duty)


class Ranker:
    def __init__(self, kit, d, depth, rows):
        dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
        with DEV:
            self.net = Net(d, depth, 8).to(dt).eval()
        self.x = torch.randn(rows, d, device=DEV, dtype=dt)
        self.best = torch.zeros(rows, device=DEV, dtype=torch.long)
        self.replay = kit.graph(self.forward)

    def forward(self):
        self.best.copy_(self.net(self.x).argmax(1))

    def rank(self):
        self.replay()
        return self.best[:16].tolist()


def cpu_burner(stop, table):
    """refreshes the price table now and then"""
    while not stop.wait(0.3):
        table["version"] = table.get("version", 0) + 1


@torch.no_grad()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    duty = rng.uniform(0.88, 0.97)
    size = kit.n(rng.choice([3072, 4096]), 64)
    peer = kit.child(subprocess.Popen(
        [sys.executable, __file__, "--role", "thumbnails", str(duty), str(size), str(kit.args.seed)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    ranker = Ranker(kit, kit.n(rng.choice([2048, 2560]), 32), kit.n(rng.choice([10, 12, 14]), 1),
                    kit.n(rng.choice([6144, 8192]), 32))
    peer.stdout.readline()
    stop = threading.Event()
    table = {}
    threading.Thread(target=cpu_burner, args=(stop, table), name="cpu_burner", daemon=True).start()
    kit.cause("gpu_cotenant", kit.place(thumbnails, "torch.mm"),
              "another process computes on the same device", "pid %d" % peer.pid)
    kit.ablate.append(kit.wipe)
    told = False
    clicks = 0
    for i in kit.steps(warm=20):
        if kit.on and not told:
            peer.stdin.write("go\n")
            peer.stdin.flush()
            told = True
        clicks += sum(ranker.rank()) & 1
    return clicks


if __name__ == "__main__":
    if "--role" in sys.argv:
        at = sys.argv.index("thumbnails")
        thumbnails(float(sys.argv[at + 1]), int(sys.argv[at + 2]), int(sys.argv[at + 3]))
    else:
        main()
