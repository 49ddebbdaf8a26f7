# SPDX-License-Identifier: Apache-2.0
"""Vector search: brute-force retrieval over a half-precision catalogue with a second ranking pass."""
import kit
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import numpy as np
import torch


@dataclass
class Answer:
    ids: np.ndarray
    score: np.ndarray


class Shelf:
    def __init__(self, stage, rows, dim):
        self.stage = stage
        self.book = torch.randn(rows, dim, device=stage.device)
        self.book = torch.nn.functional.normalize(self.book, dim=1).to(torch.half if stage.cuda else torch.float)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, 1))
        self.mlp.to(stage.device)
        self.spare = torch.zeros(64 << 20 if stage.cuda else 1 << 16, device=stage.device)
        self.paper = torch.ones(len(self.spare))

    def coarse(self, q, k):
        best = (q @ self.book.T).float().topk(k, dim=1)
        return best.values, best.indices

    def shortlist(self, floats):
        """Candidates' payload is put in order on the host."""
        n = min(floats, self.spare.numel())
        if n:
            self.paper[:n].copy_(self.spare[:n])
            self.spare[:n].copy_(self.paper[:n])

    @torch.no_grad()
    def ask(self, text):
        q = torch.from_numpy(text).to(self.stage.device, self.book.dtype)
        value, index = self.coarse(q, 64)
        near = self.book[index[:, :32]].float()
        self.shortlist(int(self.stage.amount("a")))
        second = self.mlp(near * q[:, None].float()).squeeze(-1)
        order = (second + value[:, :32]).argsort(dim=1, descending=True)
        ids = index[:, :32].gather(1, order)
        return Answer(ids.cpu().numpy(), value.cpu().numpy())


def embed(seed, batch, dim):
    rng = np.random.default_rng(seed)
    v = rng.standard_normal((batch, dim), dtype=np.float32)
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("copies", "Shelf.shortlist", kit.LIGHT, start=1.5e6, tiny=1000, least=1000, most=64 << 20),
    }, "a block goes to pageable host memory and back for nothing")
    rows = stage.pick(1_000_000, 1_300_000, 1_600_000) if not stage.smoke else 4000
    batch = stage.pick(128, 192, 256) if not stage.smoke else 8
    shelf = Shelf(stage, rows, 128)
    hits = 0
    with ThreadPoolExecutor(2, thread_name_prefix="fetch") as pool:
        ahead = [pool.submit(embed, i, batch, 128) for i in range(4)]
        i = 4
        while True:
            text = ahead.pop(0).result()
            ahead.append(pool.submit(embed, i, batch, 128))
            i += 1
            hits += int(shelf.ask(text).ids[0, 0] >= 0)
            if not stage.tick():
                stage.leave()


if __name__ == "__main__":
    main()
