# SPDX-License-Identifier: Apache-2.0
"""Chat decoding: prompts arrive by a queue, tokens are made by a captured plan."""
import queue, threading, time
import torch
from rig import Kit, DEV


def arrive(q, n, rng):
    while True:
        q.put(torch.tensor([rng.randrange(n) for _ in range(16)]))


def stall(stop):
    while not stop.wait(0.1):
        pass


@torch.no_grad()
def main(kit):
    d, depth, vocab, b = kit.n(kit.rng.choice([4096, 5120]), 16), kit.n(12, 1), kit.n(32000, 50), kit.n(16, 16)
    dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
    ws = [(torch.randn(d, 2 * d, device=DEV, dtype=dt) / d ** 0.5, torch.randn(2 * d, d, device=DEV, dtype=dt) / d ** 0.5) for _ in range(depth)]
    emb = torch.randn(vocab, d, device=DEV, dtype=dt)
    tok = torch.zeros(b, dtype=torch.long, device=DEV)

    def token():
        x = emb[tok]
        for u, v in ws:
            x = torch.nn.functional.layer_norm(x + torch.relu(x @ u) @ v, (d,))
        tok.copy_((x @ emb.T).argmax(-1))

    play = kit.graph(token)
    q = queue.Queue(8)
    threading.Thread(target=arrive, args=(q, vocab, kit.rng), name="slow-remote", daemon=True).start()
    threading.Thread(target=stall, args=(threading.Event(),), name="stall", daemon=True).start()
    kit.cause("healthy", None, "nothing was put in; one step is 32 tokens of one prompt batch, device-bound")
    for _ in kit.steps():
        tok.copy_(q.get())
        for _ in range(kit.n(32, 2)):
            play()
        tok.tolist()


if __name__ == "__main__":
    main(Kit(__file__))
