# SPDX-License-Identifier: Apache-2.0
"""bf16 training, fused optimiser, data prefetched by a thread in pinned memory, rare logging."""
import queue, threading
import torch
from runkit import Kit, Net, DEV

CUDA = DEV.type == "cuda"


def stall(q, pool):
    k = 0
    while True:
        q.put(pool[k % len(pool)])
        k += 1


def main(kit):
    d, rows = kit.n(2048, 32), kit.n(kit.rng.choice([8192, 12288]), 8)
    net = Net(d, kit.n(6, 1)).to(DEV)
    if CUDA:
        net = net.bfloat16()
    opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=CUDA)
    pool = [torch.randn(rows, d, dtype=torch.bfloat16 if CUDA else torch.float32) for _ in range(3)]
    if CUDA:
        pool = [p.pin_memory() for p in pool]
    q = queue.Queue(4)
    threading.Thread(target=stall, args=(q, pool), name="stall", daemon=True).start()
    copy = torch.cuda.Stream() if CUDA else None
    kit.cause("healthy", None, "nothing injected: large bf16 matrix products keep the device busy")

    def fetch():
        with torch.cuda.stream(copy):
            return q.get().to(DEV, non_blocking=True)

    nxt = fetch()
    for it in kit.steps():
        if CUDA:
            torch.cuda.current_stream().wait_stream(copy)
            nxt.record_stream(torch.cuda.current_stream())
        x, nxt = nxt, fetch()
        loss = (net(x) - x).float().square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 10 == 9:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
