# SPDX-License-Identifier: Apache-2.0
"""Knowledge-graph embedding (rotation model): facts live on the host as linked objects, vectors on the device."""
import gc
import random

from stage import Dial, arguments, conduct

import torch


class Fact:
    __slots__ = ("subject", "relation", "object", "seen")

    def __init__(self, subject, relation, object_, seen):
        self.subject, self.relation, self.object, self.seen = subject, relation, object_, seen


class FactBase:
    def __init__(self, entities, relations, seed):
        self.rng = random.Random(seed)
        self.entities, self.relations = entities, relations
        self.facts, self.busy = [], False
        self.resize(20_000)
        self.busy = False

    def resize(self, amount):
        amount, self.busy = int(amount), amount > 0
        if not amount:
            return
        pick = self.rng.randrange
        del self.facts[amount:]
        while len(self.facts) < amount:
            self.facts.append(Fact(pick(self.entities), pick(self.relations), pick(self.entities), [0]))

    def negatives(self, count):
        drawn = self.rng.choices(self.facts, k=count)
        for fact in drawn:
            fact.seen[0] += 1
        return [(f.subject, f.relation, f.object) for f in drawn]

    def pin_memory(self):
        return gc.collect() if self.busy else 0


class Rotation:
    def __init__(self, entities, relations, dim, corrupt, device):
        self.entity = torch.randn(entities, 2 * dim, device=device, requires_grad=True)
        self.phase = torch.rand(relations, dim, device=device, requires_grad=True)
        self.entities, self.corrupt, self.device, self.dim = entities, corrupt, device, dim

    def loss(self, triples):
        s, r, o = triples.unbind(1)
        re, im = self.entity[s].chunk(2, 1)
        c, w = self.phase[r].cos(), self.phase[r].sin()
        turned = torch.cat([re * c - im * w, re * w + im * c], 1)
        wrong = self.entity[torch.randint(self.entities, (self.corrupt,), device=self.device)]
        good = (turned - self.entity[o]).norm(dim=1)
        bad = torch.cdist(turned, wrong)
        return torch.nn.functional.softplus(good[:, None] - bad).mean()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    entities, relations, dim, corrupt, batch = (500, 20, 8, 64, 128) if args.smoke else (200_000, 500, 256, 16384, 4096)
    base = FactBase(entities, relations, args.seed)
    model = Rotation(entities, relations, dim, corrupt, args.device)
    optim = torch.optim.SGD([model.entity, model.phase], lr=0.1)
    history = []
    gc.collect()
    gc.freeze()

    def epoch_fragment():
        triples = torch.tensor(base.negatives(batch)).to(args.device)
        loss = model.loss(triples)
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()
        history.append(loss.item())
        del history[:-100]
        base.pin_memory()

    dial = Dial(5_000 if args.smoke else 150_000, hi=4_000_000, whole=True, listen=base.resize)
    conduct(args, epoch_fragment, [dial])


if __name__ == "__main__":
    main()
