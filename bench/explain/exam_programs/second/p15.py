# SPDX-License-Identifier: Apache-2.0
"""Speech encoder over long utterances."""
import threading
import torch
import torch.nn.functional as F
from rig import Kit, DEV


class Block(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b, self.g = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d), torch.nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(F.silu(self.a(x))) + self.g(x)


def encode(blocks, x):
    for b in blocks:
        x = b(x)
    return x.mean()


def exact(on):
    torch.set_float32_matmul_precision("highest" if on else "high")


def main(kit):
    d = kit.n(kit.rng.choice([1536, 2048]), 16)
    blocks = torch.nn.ModuleList([Block(d) for _ in range(kit.n(6, 1))]).to(DEV)
    opt = torch.optim.SGD(blocks.parameters(), 1e-5)
    x = torch.randn(kit.n(kit.rng.choice([8192, 12288]), 16), d, device=DEV)
    threading.Thread(target=threading.Event().wait, name="waveform-reader", daemon=True).start()
    kit.cause("device_compute", kit.place(encode, "x = b(x)"), "full fp32 products; the same with TF32 without the cause")
    for it in kit.steps():
        exact(kit.on)
        loss = encode(blocks, x)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 25 == 24:
            loss.item()


if __name__ == "__main__":
    main(Kit(__file__))
