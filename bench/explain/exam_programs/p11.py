# SPDX-License-Identifier: Apache-2.0
"""Ad click model; writes an audit record every step."""
import json, os, tempfile
import torch
from runkit import Kit, Net, DEV


class Audit:
    def __init__(self):
        fd, self.path = tempfile.mkstemp(suffix=".jsonl")
        self.f = os.fdopen(fd, "w")

    def record(self, times, **kw):
        line = json.dumps(kw) + "\n"
        for _ in range(times):
            self.f.write(line)
            self.f.flush()
            os.fsync(self.f.fileno())

    def close(self):
        os.unlink(self.path)


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(10, 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    x = torch.randn(kit.n(kit.rng.choice([1024, 2048]), 8), d, device=DEV)
    audit = Audit()
    kit.at_end.append(audit.close)

    def step():
        loss = net(x).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    base, _ = kit.measure(step)
    s = kit.share(0.16)
    cost = kit.unit(lambda: audit.record(1, step=1, loss=0.5, pad="x" * 300), 50)
    want = base * s / (1 - s)
    times, every = max(1, round(want / cost)), max(1, round(cost / want))
    kit.cause("io", kit.place(Audit.record, "os.fsync"), "%d fsync every %d steps" % (times, every))
    count = 0
    for it in kit.steps():
        v = step()
        count += 1
        if kit.on and count % every == 0:
            audit.record(times, step=it, loss=v, pad="x" * 300)


if __name__ == "__main__":
    main(Kit(__file__))
