# SPDX-License-Identifier: Apache-2.0
"""torch_loop.py STEPS [hold]: a small training-like loop that counts its copies itself.

The truth goes to standard output, one "function direction status count bytes" a line.
"""

import sys

import torch

steps = int(sys.argv[1])
device = torch.device("cuda")
weights = torch.randn(512, 512, device=device)
spare = torch.empty(512, 512, device=device)
pinned = torch.empty(256, 512, pin_memory=True)
there = torch.empty(256, 512, device=device)
there.copy_(pinned, non_blocking=True)
(there @ weights).sum().item()  # libraries are loaded and their handles made before it counts
torch.cuda.synchronize()
if sys.argv[2:] == ["hold"]:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)

count = {"h2d": 0, "d2h": 0, "d2d": 0}
moved = {"h2d": 0, "d2h": 0, "d2d": 0}


def note(direction: str, tensor: torch.Tensor) -> None:
    count[direction] += 1
    moved[direction] += tensor.numel() * tensor.element_size()


for step in range(steps):
    batch = torch.ones(64 + step % 64, 512)
    x = batch.to(device)
    note("h2d", batch)
    there.copy_(pinned, non_blocking=True)
    note("h2d", pinned)
    y = torch.relu(x @ weights) @ weights
    spare.copy_(weights)
    note("d2d", weights)
    back = y.cpu()
    note("d2h", back)
    loss = y.sum()
    loss.item()
    note("d2h", loss)
    torch.cuda.synchronize()

for direction in count:
    print(f"cudaMemcpyAsync {direction} 0 {count[direction]} {moved[direction]}")
print(f"cudaDeviceSynchronize - 0 {steps} 0")
