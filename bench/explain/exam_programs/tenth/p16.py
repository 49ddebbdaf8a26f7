# SPDX-License-Identifier: Apache-2.0
"""Embedding service with one captured graph a shape; requests are padded to buckets where a bucket fits."""
import math
import random
import time
from collections import OrderedDict

import torch
import torch.nn.functional as F

import stage


class Encoder:
    def __init__(self, dev, depth, d, heads):
        r = lambda *s: torch.randn(*s, device=dev, dtype=torch.bfloat16) / math.sqrt(s[-1])
        self.heads = heads
        self.layers = [(r(3 * d, d), r(d, d), r(4 * d, d), r(d, 4 * d)) for _ in range(depth)]

    def __call__(self, x):
        b, t, d = x.shape
        h = x
        for qkv, o, up, down in self.layers:
            q, k, v = F.linear(F.layer_norm(h, (d,)), qkv).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
            h = h + F.linear(a, o)
            h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (d,)), up)), down)
        return h.mean(1).float()


class Plans:
    """Executable plans by (batch, length), the least recently used one goes first."""

    def __init__(self, st, net, batch, d, room=4):
        self.st, self.net, self.batch, self.d, self.room = st, net, batch, d, room
        self.fixed, self.loose = {}, OrderedDict()
        self.side = None if st.smoke else torch.cuda.Stream()
        self.pool = None if st.smoke else torch.cuda.graph_pool_handle()
        self.x = torch.randn(batch, st.pick(256, 24), d, device=st.device, dtype=torch.bfloat16)

    def build(self, length):
        x = self.x[:, :length]
        if self.side is None:
            for _ in range(2):
                torch.jit.trace(lambda y: self.net(y), (x,), check_trace=False)
            return lambda: self.net(x)
        torch.cuda.current_stream().synchronize()
        g = torch.cuda.CUDAGraph()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            g.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            out = self.net(x)
            g.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)

        def run():
            g.replay()
            return out
        return run

    def lookup(self, length, exact):
        if not exact:
            return self.fixed[min(b for b in self.fixed if b >= length)]
        plan = self.loose.get(length)
        if plan is None:
            if len(self.loose) >= self.room:
                self.loose.popitem(last=False)
            plan = self.loose[length] = self.build(length)
        return plan


@torch.no_grad()
def main():
    st = stage.Stage()
    batch, d = st.pick(24, 2), st.pick(1024, 32)
    net = Encoder(st.device, st.pick(10, 2), d, st.pick(16, 2))
    plans = Plans(st, net, batch, d)
    if plans.side is not None:
        with torch.cuda.stream(plans.side):
            net(plans.x)
        torch.cuda.synchronize()
    big = st.pick(256, 24)
    plans.fixed[big] = plans.build(big)
    lengths = list(range(big - st.pick(24, 12), big))
    random.Random(st.seed).shuffle(lengths)
    state = {"rate": 0.0, "debt": 0.0, "n": 0}
    stage.background(lambda: [time.sleep(0.25) for _ in iter(int, 1)], "request-sync-io")

    def serve():
        """Four requests make one batch of answers."""
        answers = []
        with torch.no_grad():
            for _ in range(4):
                state["debt"] += state["rate"] / 4
                exact = state["debt"] >= 1
                if exact:
                    state["debt"] -= 1
                    state["n"] += 1
                answers.append(plans.lookup(lengths[state["n"] % len(lengths)], exact)()[:, :8].clone())
            state["last"] = torch.stack(answers).sum().item()

    def turn(a):
        state["rate"] = float(a)
        if not a:
            state["debt"] = 0.0

    knob = stage.Knob("recompilation", "Plans.build", turn, 0.4, "middle", alt="Plans.lookup", top=4.0, whole=False)
    st.perform(serve, [knob], window=0.45)


if __name__ == "__main__":
    main()
