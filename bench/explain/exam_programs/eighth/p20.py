# SPDX-License-Identifier: Apache-2.0
"""Molecular dynamics with restraints; a steering service in another process sees every frame."""
import socket
import struct
import time

import torch

import exam_kit as kit


def steering(port_box, think):
    """Looks at the energy of a frame and answers with a bias."""
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen(1)
    port_box.value = s.getsockname()[1]
    c, _ = s.accept()
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bias = 0.0
    while True:
        raw = c.recv(8)
        if len(raw) < 8:
            return
        if think.value:
            time.sleep(think.value * 1e-6)
        bias = 0.9 * bias + 1e-9 * struct.unpack("d", raw)[0]
        c.sendall(struct.pack("d", max(-1.0, min(1.0, bias))))


class Link:
    def __init__(self, port):
        self.s = socket.create_connection(("127.0.0.1", port))
        self.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, energy):
        self.s.sendall(struct.pack("d", energy))
        return struct.unpack("d", self.s.recv(8))[0]


class Field:
    def __init__(self, n, groups, dev):
        self.x = torch.rand(n, 3, device=dev) * 10
        self.v = torch.zeros(n, 3, device=dev)
        self.groups = groups
        self.split = 0
        self.anchor = self.x[:64 * groups].view(groups, 64, 3).mean(1)

    def pair_force(self):
        d2 = torch.cdist(self.x, self.x).square_().add_(0.5)
        w = d2.reciprocal_()
        w = w * w
        f = self.x * w.sum(1, keepdim=True) - w @ self.x
        return f * 1e-4, w.sum()

    def restrain(self, f, bias):
        g = f[:64 * self.groups].view(self.groups, 64, 3)
        xs = self.x[:64 * self.groups].view(self.groups, 64, 3)
        g += (self.anchor - xs.mean(1)).unsqueeze(1) * (0.01 + bias)
        for k in range(self.split):
            k %= self.groups
            pull = xs[k].mean(0) - self.anchor[k]
            g[k] -= pull * 0.01
            g[k].clamp_(-5.0, 5.0)

    def advance(self, f):
        self.v.add_(f, alpha=1e-3).mul_(0.999)
        self.x.add_(self.v, alpha=1e-3)


class GcTunedDynamics(kit.Job):
    detail = "restraints are applied group by group; every frame waits for the steering service's answer"

    def __init__(self, ctx):
        port, self.think = kit.shared(0), kit.shared(0)
        kit.spawn(steering, port, self.think)
        self.field = Field(ctx.pick(300, 12288, 16384), ctx.pick(4, 128, 160), ctx.dev)
        while not port.value:
            time.sleep(0.02)
        self.link = Link(int(port.value))
        self.bias = 0.0
        self.levers = [
            kit.Lever("launch_overhead", "Field.restrain", self.set_split, ctx.share(0.17, 0.23),
                      start=ctx.pick(2, 40)),
            kit.Lever("sleep_or_remote_wait", "Link.exchange", self.set_think, ctx.share(0.17, 0.23),
                      start=ctx.pick(100, 1000))]

    def set_split(self, a):
        self.field.split = a

    def set_think(self, a):
        self.think.value = a

    @torch.no_grad()
    def step(self):
        f, e = self.field.pair_force()
        self.bias = self.link.exchange(e.item())
        self.field.restrain(f, self.bias)
        self.field.advance(f)


if __name__ == "__main__":
    kit.main(GcTunedDynamics)
