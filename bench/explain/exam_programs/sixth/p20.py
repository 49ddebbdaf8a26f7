# SPDX-License-Identifier: Apache-2.0
"""Self-play for a stone-placing board game: legal moves on the host, position evaluation on the device."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p20")
SIDE = job.size([13, 15], 5)
GAMES = job.size([1024, 1536], 4)
CH = job.size([96, 128], 8)
DEPTH = job.size([6, 8], 1)
DT = torch.bfloat16 if job.cuda else torch.float32


class Evaluator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(2, CH, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(CH, CH, 3, padding=1) for _ in range(DEPTH))
        self.pi = nn.Conv2d(CH, 1, 1)

    def forward(self, x):
        h = F.relu(self.inp(x))
        for c in self.body:
            h = h + F.relu(c(h))
        return self.pi(h).flatten(1)


class Boards:
    def __init__(self):
        self.cells = np.zeros((GAMES, SIDE, SIDE), np.int8)
        self.rng = np.random.default_rng(job.seed)
        self.careful = 0
        self.libs = {}

    def free(self):
        return (self.cells == 0).reshape(GAMES, -1)

    def load_opening_book(self):
        """Liberties of the stones of the boards under closer watch."""
        for k in range(self.careful):
            g = k % GAMES
            rows = self.cells[g].tolist()
            n = 0
            for y in range(SIDE):
                for x in range(SIDE):
                    if rows[y][x]:
                        n += (x > 0 and rows[y][x - 1] == 0) + (y > 0 and rows[y - 1][x] == 0)
            self.libs[g] = n

    def play(self, moves, colour):
        self.cells.reshape(GAMES, -1)[np.arange(GAMES), moves] = colour
        full = self.free().sum(1) < SIDE
        self.cells[full] = 0


class SelfPlay:
    def __init__(self):
        self.net = Evaluator().to(job.dev, DT).to(memory_format=torch.channels_last).eval()
        self.boards = Boards()
        self.views = 0
        self.colour = 1

    def empty_cache_views(self, x):
        """Averages the evaluation over further views of the first positions."""
        total = None
        left, turn = self.views, 0
        while left > 0:
            part = x[:min(left, GAMES)]
            v = self.net(torch.rot90(part, turn % 4, (2, 3)).contiguous(memory_format=torch.channels_last))
            total = v.mean() if total is None else total + v.mean()
            left -= part.shape[0]
            turn += 1
        return total

    @torch.no_grad()
    def ply(self):
        self.boards.load_opening_book()
        cells = torch.from_numpy(self.boards.cells).to(job.dev)
        x = torch.stack([cells == 1, cells == -1], 1).to(DT).contiguous(memory_format=torch.channels_last)
        logits = self.net(x).float()
        shift = self.empty_cache_views(x)
        if shift is not None:
            logits = logits + shift.float()
        free = torch.from_numpy(self.boards.free()).to(job.dev)
        noise = torch.rand_like(logits)
        moves = (logits + 3 * noise).masked_fill(~free, -1e9).argmax(1).cpu().numpy()
        self.boards.play(moves, self.colour)
        self.colour = -self.colour


def main():
    s = SelfPlay()

    def careful(n, on):
        s.boards.careful = int(n) if on else 0

    def views(n, on):
        s.views = int(n) if on else 0
    cs = [kit.Cause("host_code", "Boards.load_opening_book", careful, job.share(0.17, 0.22), job.size(40, 4), 1, 200_000),
          kit.Cause("device_compute", "Evaluator.forward", views, job.share(0.17, 0.22), job.size(600, 4), 4, 200_000)]
    kit.examine(job, cs, "liberties are counted in pure Python and never used; further rotated views are evaluated whose mean "
                "only shifts all logits alike (called from SelfPlay.empty_cache_views)", step=s.ply)


if __name__ == "__main__":
    main()
