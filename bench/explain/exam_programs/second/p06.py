# SPDX-License-Identifier: Apache-2.0
"""Actor-critic with a long record of transitions."""
import collections, gc, time
import torch
from rig import Kit, Net, DEV


class Diary:
    def __init__(self, size):
        self.old = [[i, [i]] for i in range(size)]
        self.new = collections.deque(maxlen=size // 2)

    def record(self, step, k):
        for i in range(k):
            self.new.append([step, [i]])


def price(diary, k):
    """seconds per entry that the collector takes, beyond making the entry"""
    t = []
    for use in (False, True):
        (gc.enable if use else gc.disable)()
        a = time.perf_counter()
        for i in range(k // 1000):
            diary.record(i, 1000)
        t.append(time.perf_counter() - a)
    return max(1e-7, (t[1] - t[0]) / k)


def main(kit):
    d, envs = kit.n(kit.rng.choice([512, 768]), 16), kit.n(2048, 8)
    net = Net(d, kit.n(6, 1), 18).to(DEV)
    opt = torch.optim.RMSprop(net.parameters(), 1e-5)
    obs = torch.randn(envs, d, device=DEV)
    diary = Diary(kit.n(600_000, 2000))

    def update():
        out = net(obs)
        act = out[:, :17].softmax(-1).argmax(-1)
        loss = (out[:, 17] - 1).square().mean() - out.log_softmax(-1).gather(1, act[:, None]).mean() * 0.01
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return act[:16].tolist()

    base, _ = kit.measure(update)
    make = kit.unit(lambda: diary.record(0, 1000), 5) / 1000
    s = kit.share(0.22)
    cost = price(diary, kit.n(1_200_000, 2000))
    k = max(10, min(40000, int(base * s / max(1e-8, (1 - s) * cost - s * make / 2))))
    kit.cause("gc", kit.place(Diary.record, "self.new.append"), "automatic collections walk a large heap that only grows references here")
    kit.ablate.append(gc.disable)
    gc.enable()
    for it in kit.steps():
        update()
        diary.record(it, k)


if __name__ == "__main__":
    main(Kit(__file__))
