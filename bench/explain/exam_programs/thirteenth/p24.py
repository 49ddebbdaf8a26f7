# SPDX-License-Identifier: Apache-2.0
"""Registration of medical volumes: a moving scan is warped onto a fixed one by gradient steps on a displacement grid."""
from stage import Dial, arguments, conduct

import torch
import torch.nn.functional as F


class Bay:
    """Where raw scans wait; the strip at the front of each goes to the device as a guard band."""

    STRIP = 65536

    def __init__(self, bytes_, device, amount):
        self.gpu, self.amount = device == "cuda", amount
        self.raw = torch.ones(bytes_, dtype=torch.uint8)
        self.strip = torch.zeros(self.STRIP, dtype=torch.uint8, device=device)

    def synchronize(self):
        count = min(self.amount() * 4096, self.raw.numel())
        if not count:
            return
        count = max(count, self.STRIP)
        if self.gpu:
            driver = torch.cuda.cudart()
            code = driver.cudaHostRegister(self.raw.data_ptr(), count, 0)
            if int(code):
                raise RuntimeError(f"register: {code}")
            self.strip.copy_(self.raw[:self.STRIP], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            code = driver.cudaHostUnregister(self.raw.data_ptr())
            if int(code):
                raise RuntimeError(f"unregister: {code}")
        else:
            for at in range(0, count, self.STRIP):
                self.strip.copy_(self.raw[at:at + self.STRIP])


class Registration:
    def __init__(self, side, grid, device, bay):
        axis = torch.linspace(-1, 1, side, device=device)
        z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
        self.identity = torch.stack([x, y, z], -1)[None]
        self.fixed = torch.exp(-4 * (x ** 2 + y ** 2 + z ** 2))[None, None]
        self.moving = torch.exp(-4 * ((x - 0.2) ** 2 + y ** 2 + (z + 0.1) ** 2))[None, None]
        self.grid = torch.zeros(1, 3, grid, grid, grid, device=device, requires_grad=True)
        self.optim = torch.optim.Adam([self.grid], lr=1e-3)
        self.bay, self.side = bay, side

    def energy(self):
        dense = F.interpolate(self.grid, size=(self.side,) * 3, mode="trilinear", align_corners=True)
        warped = F.grid_sample(self.moving, self.identity + dense.permute(0, 2, 3, 4, 1), align_corners=True)
        rough = sum((self.grid.diff(dim=d) ** 2).mean() for d in (2, 3, 4))
        return F.mse_loss(warped, self.fixed) + 0.1 * rough

    def backtrack(self):
        self.bay.synchronize()
        for _ in range(2):
            self.optim.zero_grad(set_to_none=True)
            loss = self.energy()
            loss.backward()
            self.optim.step()
        return loss.item()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    side, grid, room = (24, 12, 16 << 20) if args.smoke else (256, 128, 768 << 20)
    dial = Dial(200 if args.smoke else 1500, hi=room // 4096, whole=True)
    work = Registration(side, grid, args.device, Bay(room, args.device, dial))
    conduct(args, work.backtrack, [dial])


if __name__ == "__main__":
    main()
