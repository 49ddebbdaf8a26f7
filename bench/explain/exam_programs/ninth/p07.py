# SPDX-License-Identifier: Apache-2.0
"""Contextual bandit for banners: linear Thompson sampling with a publisher that signs what it ships."""
import kit
import hashlib
import queue
import threading
import time
import torch


class Publisher(threading.Thread):
    def __init__(self, shelf, size):
        super().__init__(name="idle-poll", daemon=True)
        self.shelf = shelf
        self.inbox = queue.Queue()
        self.blob = memoryview(bytes(size))
        self.signed = {}

    def run(self):
        while True:
            version, size = self.inbox.get()
            with self.shelf:
                self.signed = {version: hashlib.sha256(self.blob[:size]).hexdigest()}


class Arms:
    def __init__(self, stage, arms, dim, crowd):
        d = stage.device
        self.stage, self.dim, self.crowd = stage, dim, crowd
        self.shelf = threading.Lock()
        self.publisher = Publisher(self.shelf, (1 << 28) if stage.cuda else 1 << 22)
        self.publisher.start()
        self.theta = torch.zeros(arms, dim, device=d)
        self.gram = torch.eye(dim, device=d).repeat(arms, 1, 1)
        self.moment = torch.zeros(arms, dim, device=d)
        self.secret = torch.randn(arms, dim, device=d) / dim ** 0.5
        self.version, self.regret = 0, 0.0

    def current(self):
        with self.shelf:
            return self.theta

    def draw(self, theta):
        ctx = torch.randn(self.crowd, self.dim, device=self.stage.device)
        noise = torch.randn_like(theta) * 0.05
        arm = (ctx @ (theta + noise).T).argmax(1)
        reward = (ctx * self.secret[arm]).sum(1)
        return ctx, arm, reward

    def update(self, ctx, arm, reward):
        hot = torch.nn.functional.one_hot(arm, self.theta.shape[0]).to(ctx.dtype)
        self.gram = 0.99 * self.gram + 0.01 * torch.einsum("na,nd,ne->ade", hot[:2048], ctx[:2048], ctx[:2048])
        self.moment = 0.99 * self.moment + 0.01 * (hot * reward[:, None]).T @ ctx
        chol = torch.linalg.cholesky_ex(self.gram + 0.1 * torch.eye(self.dim, device=ctx.device)).L
        self.theta = torch.cholesky_solve(self.moment[..., None], chol).squeeze(-1)

    def round(self):
        theta = self.current()
        ctx, arm, reward = self.draw(theta)
        self.update(ctx, arm, reward)
        self.version += 1
        size = int(self.stage.amount("a"))
        if size and self.publisher.inbox.empty():
            self.publisher.inbox.put((self.version, size))
        self.regret += reward.mean().item()


def beat():
    while True:
        time.sleep(0.1)


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("lock", "Arms.current", kit.MIDDLE, start=8e6, tiny=2e6, alt="Publisher.run", least=3e4, most=(1 << 28) - 1),
    }, "the publisher hashes while holding the lock the next round needs", window=0.6)
    arms = stage.pick(24, 32, 40) if not stage.smoke else 4
    dim = stage.pick(96, 128) if not stage.smoke else 8
    crowd = stage.pick(800_000, 1_000_000, 1_200_000) if not stage.smoke else 256
    threading.Thread(target=beat, name="slow-service", daemon=True).start()
    game = Arms(stage, arms, dim, crowd)
    while True:
        game.round()
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
