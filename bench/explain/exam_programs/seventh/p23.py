# SPDX-License-Identifier: Apache-2.0
"""Factor research: user formulas evaluated on price panels, each day's scores shown in a viewer process."""
import socket, sys
import exam_kit
from exam_kit import Cause


def viewer(port):
    s = socket.create_connection(("127.0.0.1", port))
    while s.recv(1 << 16):
        pass


def make_formula(torch, coefs):
    class Formula(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.c = list(coefs)

        def forward(self, panel, mix):
            x = panel @ mix
            for c in self.c:
                x = torch.tanh(x * c + panel) if c > 0.5 else torch.addmm(panel, x, mix, alpha=c)
            return x.mean(1)
    return Formula()


class Viewer:
    def __init__(self):
        with socket.socket() as srv:
            srv.bind(("127.0.0.1", 0))
            srv.listen(1)
            self.child = exam_kit.spawn(__file__, "--role", srv.getsockname()[1])
            srv.settimeout(60)
            self.conn, _ = srv.accept()
        self.conn.settimeout(30)
        self.conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.single = 0

    def synchronize_scores(self, lines):
        k = self.single
        for i in range(k):
            self.conn.sendall(lines[i % len(lines)])
        self.conn.sendall(b"".join(lines))


class Research:
    def __init__(self, rng, smoke, dev):
        import torch
        import torch.fx
        self.torch, self.dev = torch, dev
        n, d = (16, 16) if smoke else (rng.choice([12288, 16384]), 1024)
        self.panel = torch.randn(n, d, device=dev)
        self.mix = torch.randn(d, d, device=dev) / d ** 0.5
        self.formulas = [make_formula(torch, [rng.random() for _ in range(6)]) for _ in range(4 if smoke else 8)]
        self.ready = [torch.fx.symbolic_trace(f) for f in self.formulas]
        self.view = Viewer()
        self.again = 0.0
        self.credit = 0.0
        self.causes = [Cause("recompilation", "Research.load_panel", self.set_again, 1.0, 0.02, 64),
                       Cause("io", "Viewer.synchronize_scores", self.set_single, 100, 2, 50000, integer=True)]

    def set_again(self, a, on):
        self.again = a if on else 0.0
        self.credit = 0.0

    def set_single(self, a, on):
        self.view.single = int(a) if on else 0

    def load_panel(self, i):
        self.ready[i] = self.torch.fx.symbolic_trace(self.formulas[i])

    def step(self):
        torch = self.torch
        self.credit += self.again
        i = 0
        while self.credit >= 1.0:
            self.credit -= 1.0
            self.load_panel(i % len(self.formulas))
            i += 1
        with torch.no_grad():
            best = [f(self.panel, self.mix).topk(8).values for f in self.ready]
            rows = torch.stack(best).tolist()
        self.view.synchronize_scores([("%d:%s\n" % (j, r)).encode() for j, r in enumerate(rows)])

    def close(self):
        self.view.conn.close()


if __name__ == "__main__":
    if "--role" in sys.argv:
        exam_kit.die_with_parent()
        viewer(int(sys.argv[2]))
    else:
        exam_kit.main(Research, "pair", "formulas are traced again though unchanged; score lines are sent to the viewer one by one as well")
