# SPDX-License-Identifier: Apache-2.0
"""Programs on a GPU that faults are done to. Each knows its own pace, which diagnosis does not see.

    python -m bench.faults.on_gpu.victims KIND STEPS_FILE [ARGUMENT…]

Prints LOADED once its modules are there, takes its device at a line `warm` on standard input,
prints READY after a few steps, and goes on with them at a line `go`. Lines after it are commands
(`sync 2`); at SIGTERM it writes when each step ended (CLOCK_MONOTONIC, ns) to
STEPS_FILE, and ends. Without a GPU it does the same, smaller, on the CPU.
"""

from __future__ import annotations

import array
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from bench.faults.on_gpu import own_faults

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SETTING = own_faults.SETTING
STEPS = array.array("Q")
OWN_PID = os.getpid()
FIRST_STEPS = 4 if ON_GPU else 2
"""Before it is ready: no more, since another victim is at work on the device meanwhile."""
Step = Callable[[], None]


def main() -> None:
    """Run one of them."""
    kind, steps_file, *arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: _end(Path(steps_file)))
    torch.set_num_threads(1)
    print("LOADED", flush=True)
    if sys.stdin.readline().strip() != "warm":
        os._exit(1)
    step = KINDS[kind](*arguments)
    for _ in range(FIRST_STEPS):
        step()
    print("READY", flush=True)
    if sys.stdin.readline().strip() != "go":
        os._exit(1)
    threading.Thread(target=own_faults.obey, args=(sys.stdin,), daemon=True).start()
    log = Path(steps_file).with_suffix(".log")
    while True:
        step()
        if kind != "decode":
            STEPS.append(time.monotonic_ns())
            own_faults.after_step(log)


def _end(path: Path) -> NoReturn:
    if os.getpid() == OWN_PID:  # no worker of its
        path.write_bytes(STEPS.tobytes())
    os._exit(0)


class Block(nn.Module):  # type: ignore[misc]
    """One block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = _attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        x = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        own_faults.in_layer()
        return x


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    fused = getattr(nn.functional, "scaled_dot_product_attention", None)
    if fused is not None:
        return fused(q, k, v)
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def _trainer(width: int, layers: int, batch: int, length: int) -> Step:
    """Steps of training on batches from pinned memory; the loss is read after each."""
    model = nn.Sequential(*(Block(width, width // 64) for _ in range(layers))).to(DEVICE, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    host = _pinned(9 * batch * length * width)
    temporary = own_faults.Temporary(DEVICE)

    def step() -> None:
        rows = max(1, int(batch * SETTING.get("batch", 1.0)))
        columns = max(8, int(length * SETTING.get("length", 1.0)))
        mine = host[: rows * columns * width].view(rows, columns, width)
        x = mine.to(DEVICE, non_blocking=True)
        temporary.use()
        loss = model(x).float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        own_faults.read_norms(model)
        optimizer.step()
        loss.item()
        if passes := int(SETTING.pop("evaluate", 0)):
            _evaluate(model, mine, passes)
        if SETTING.pop("checkpoint", 0):
            own_faults.save(model)
        if SETTING.pop("warm-up", 0):
            _warm_up(width)

    return step


def _evaluate(model: nn.Module, host: torch.Tensor, seconds: int) -> None:
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            model(host.to(DEVICE, non_blocking=True)).float().mean().item()


def _warm_up(width: int) -> None:
    """What comes with the first steps of another model: it is built, and its kernels are loaded."""
    other = nn.Sequential(*(Block(width, width // 32) for _ in range(4))).to(DEVICE, DTYPE)
    for length in (17, 33, 65, 129):
        other(torch.ones(3, length, width, device=DEVICE, dtype=DTYPE)).float().sum().backward()


def _pinned(*shape: int) -> torch.Tensor:
    found = torch.full(shape, 0.1, dtype=DTYPE)
    return found.pin_memory() if ON_GPU else found


def train() -> Step:
    """Training whose device is the bottleneck: some 20 ms a step."""
    return _trainer(1024, 8, 16, 512) if ON_GPU else _trainer(128, 2, 2, 32)


def eager() -> Step:
    """Training whose host is the bottleneck: small kernels."""
    return _trainer(256, 6, 8, 64) if ON_GPU else _trainer(64, 2, 2, 16)


def graph() -> Step:
    """Inference by replays of a CUDA graph; results are read after each."""
    width, batch, length = (2048, 8, 256) if ON_GPU else (128, 2, 16)
    model = nn.Sequential(*(Block(width, width // 64) for _ in range(6))).to(DEVICE, DTYPE)
    host = _pinned(batch, length, width)
    static = torch.zeros(batch, length, width, device=DEVICE, dtype=DTYPE)
    captured = None
    with torch.no_grad():
        for _ in range(3):
            result = model(static).float().mean(dim=(1, 2))
        if ON_GPU:
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                result = model(static).float().mean(dim=(1, 2))
    temporary = own_faults.Temporary(DEVICE)

    def step() -> None:
        nonlocal result
        static.copy_(host, non_blocking=True)
        temporary.use()
        for _ in range(max(1, int(SETTING.get("batch", 1.0)))):
            if captured is not None:
                captured.replay()
            else:
                result = model(static).float().mean(dim=(1, 2))
        result.cpu()
        if passes := int(SETTING.pop("evaluate", 0)):
            _evaluate(model, host, passes)

    return step


def copy() -> Step:
    """Copies to the device and back, with little work between them."""
    count = (32 << 20) if ON_GPU else (1 << 18)
    host, back = _pinned(count), _pinned(count)
    there = torch.empty(count, device=DEVICE, dtype=DTYPE)

    def step() -> None:
        part = int(count * min(1.0, SETTING.get("batch", 1.0) / 2))
        there[:part].copy_(host[:part], non_blocking=True)
        there[:part].mul_(0.5)
        back[:part].copy_(there[:part], non_blocking=True)
        if ON_GPU:
            torch.cuda.current_stream().synchronize()

    return step


class _Samples(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __init__(self, busy: Any, asleep: Any) -> None:
        self.busy, self.asleep = busy, asleep

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(os.getpid())
        torch.set_num_threads(1)
        while True:
            sample = torch.randn(64, 1024, generator=generator)
            until = time.monotonic() + self.busy.value
            while time.monotonic() < until:
                sample = sample.roll(1, 0)
            time.sleep(self.asleep.value)
            yield sample


def loader() -> Step:
    """Training fed by a DataLoader with worker processes."""
    busy, asleep = multiprocessing.Value("d", 0.0), multiprocessing.Value("d", 0.0)
    own_faults.LOADER.update(busy=busy, sleep=asleep)
    data: Any = torch.utils.data.DataLoader(
        _Samples(busy, asleep), batch_size=8, num_workers=2, pin_memory=ON_GPU
    )
    batches = iter(data)
    width = 1024
    layers = [nn.Linear(width, width) for _ in range(8 if ON_GPU else 2)]
    model = nn.Sequential(*layers).to(DEVICE, DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        x = next(batches).to(DEVICE, DTYPE, non_blocking=True)
        for _ in range(4 if ON_GPU else 1):
            loss = model(x).float().square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        loss.item()
        if SETTING.pop("checkpoint", 0):
            own_faults.save(model)

    return step


def decode(port: str) -> Step:
    """Answers requests over HTTP, each with some tokens decoded one after another. Its client has
    the latencies."""
    width = 512 if ON_GPU else 64
    model = nn.Sequential(*(Block(width, width // 64) for _ in range(4))).to(DEVICE, DTYPE)
    one_at_a_time = threading.Lock()
    log = Path(sys.argv[2]).with_suffix(".log")

    def answer() -> float:
        tokens = int((24 if ON_GPU else 2) * SETTING.get("length", 1.0))
        x = torch.ones(1, 16, width, device=DEVICE, dtype=DTYPE)
        last = 0.0
        with torch.no_grad():
            for _ in range(tokens):
                y = model(x)
                last = y[0, -1].float().argmax().item()
        own_faults.after_step(log)
        return last

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            with one_at_a_time:
                body = str(answer()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            STEPS.append(time.monotonic_ns())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    warm = itertools.count()

    def step() -> None:
        if next(warm) < (20 if ON_GPU else 2):
            answer()
            return
        server.serve_forever()

    return step


KINDS: dict[str, Callable[..., Step]] = {
    "train": train,
    "eager": eager,
    "graph": graph,
    "copy": copy,
    "loader": loader,
    "decode": decode,
}

if __name__ == "__main__":
    random.seed(0)
    main()
