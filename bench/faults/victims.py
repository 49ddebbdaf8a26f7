# SPDX-License-Identifier: Apache-2.0
"""Programs that faults are done to. Each knows its own pace, which diagnosis does not see.

    python bench/faults/victims.py KIND STEPS_FILE [ARGUMENT…]

Commands come as lines on standard input (`gil 1`); at SIGTERM it writes when each step ended
(CLOCK_MONOTONIC, ns) to STEPS_FILE, and ends.
"""

from __future__ import annotations

import array
import gc
import http.client
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "POCL_MAX_PTHREAD_COUNT"):
    os.environ.setdefault(name, "1")

import numpy as np  # noqa: E402

STEPS = array.array("Q")
SETTING: dict[str, float] = {}
LOCK = threading.Lock()
SAMPLE = 256 << 10
Step = Callable[[], None]


def main() -> None:
    """Run one of them."""
    kind, steps_file, *arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: _end(Path(steps_file)))
    step = KINDS[kind](*arguments)
    threading.Thread(target=_obey, daemon=True).start()
    while True:
        step()
        STEPS.append(time.monotonic_ns())
        _own_faults(Path(steps_file).with_suffix(".log"))


def _end(path: Path) -> NoReturn:
    path.write_bytes(STEPS.tobytes())
    os._exit(0)


def _obey() -> None:
    for line in sys.stdin:
        name, _, value = line.partition(" ")
        SETTING[name] = float(value)
        if name == "gil":
            for _ in range(int(float(value))):
                threading.Thread(target=_hog, daemon=True).start()
        if name == "lock":
            threading.Thread(target=_hold, daemon=True).start()
        if name == "checkpoint":
            threading.Thread(target=_checkpoint, args=(float(value),), daemon=True).start()


def _hog() -> None:
    """Python code that never lets the interpreter's lock go by itself."""
    count = 0
    while SETTING.get("gil"):
        for number in range(10_000):
            count += number * number


def _hold() -> None:
    while share := SETTING.get("lock"):
        with LOCK:
            _busy(0.04 * share)
        time.sleep(0.04 * (1 - share) + 0.0002)


def _busy(seconds: float) -> None:
    """Work outside the interpreter's lock."""
    until = time.monotonic() + seconds
    matrix = np.ones((160, 160))
    while time.monotonic() < until:
        matrix = matrix @ matrix
        matrix /= matrix.max()


def _checkpoint(megabytes: float) -> None:
    path = Path(f"/var/tmp/sonde-faults-{os.getpid()}.ckpt")
    try:
        path.write_bytes(os.urandom(1 << 20) * int(megabytes))
    finally:
        path.unlink()


_GARBAGE: list[Any] = []
_RANDOM = os.urandom(512 << 10)
"""Made once: to make it takes longer than to write it, which would be another fault."""


def _own_faults(log: Path) -> None:
    """What the program does to itself, from the command to do so."""
    if SETTING.get("lock"):
        with LOCK:
            pass
    if objects := int(SETTING.get("gc", 0)):
        while len(_GARBAGE) < objects:
            _GARBAGE.append([len(_GARBAGE)])
        gc.collect()
    if kilobytes := int(SETTING.get("fsync", 0)):
        with log.open("ab") as file:
            file.write(_RANDOM[: 1024 * kilobytes])
            file.flush()
            os.fsync(file.fileno())
        if log.stat().st_size > 64 << 20:
            log.unlink()
    if seconds := SETTING.pop("evaluate", 0.0):
        _evaluate(seconds)


def _evaluate(seconds: float) -> None:
    until = time.monotonic() + seconds
    weights = np.random.default_rng(1).random((200, 200))
    while time.monotonic() < until:
        np.linalg.svd(weights[:120, :120])


def train() -> Step:
    """Steps of a small network, some 10 ms each, on one CPU."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((256, 256)) * 0.05 for _ in range(3)]

    def step() -> None:
        batch = rng.standard_normal((int(SETTING.get("batch", 96)), 256))
        layers = [batch]
        for matrix in weights:
            layers.append(np.tanh(layers[-1] @ matrix))
        error = layers[-1] - batch
        for matrix, layer in zip(reversed(weights), reversed(layers[:-1]), strict=True):
            gradient = layer.T @ error
            error = error @ matrix.T
            matrix -= 1e-4 * gradient

    return step


def opencl() -> Step:
    """Launches on PoCL's CPU device, one result read back each step."""
    import pyopencl as cl

    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    source = (
        "__kernel void f(__global float *x) { int i = get_global_id(0);"
        " float y = x[i]; for (int k = 0; k < 400; k++) y = y * 0.999f + 0.5f; x[i] = y; }"
    )
    kernel = cl.Kernel(cl.Program(context, source).build(), "f")
    host = np.ones(16_384, np.float32)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffer = cl.Buffer(context, flags, hostbuf=host)

    def step() -> None:
        for _ in range(int(SETTING.get("batch", 2))):
            kernel(queue, host.shape, None, buffer)
        cl.enqueue_copy(queue, host, buffer)

    return step


def read(path: str, how: str) -> Step:
    """Samples of a file at random, decoded. `how`: cached, or disk: past the page cache."""
    size = Path(path).stat().st_size
    flags = os.O_RDONLY | (os.O_DIRECT if how == "disk" else 0)
    fd = os.open(path, flags)
    chance = random.Random(0)
    target = mmap.mmap(-1, SAMPLE)
    # From memory a sample comes so fast that more work would hide what a disk takes.
    passes = 2 if how == "cached" else 8

    def step() -> None:
        offset = chance.randrange(size // SAMPLE) * SAMPLE
        os.preadv(fd, [target], offset)
        sample = np.frombuffer(target, np.uint8).astype(np.float32)
        for _ in range(passes):
            sample = sample * 0.99 + 1.0

    return step


def loader() -> Step:
    """A worker process prepares samples, this one computes on them."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _work(theirs)
    theirs.close()
    from_worker = ours.makefile("rb")
    weights = np.random.default_rng(0).standard_normal((256, 256))

    def step() -> None:
        for name in ("slow-worker", "slow-sleep"):
            if name in SETTING:
                ours.send(f"{name} {SETTING.pop(name)}\n".encode())
        raw = from_worker.read(SAMPLE)
        batch = np.frombuffer(raw, np.uint8)[: 64 * 256].reshape(64, 256) / 255.0
        for _ in range(6):
            batch = np.tanh(batch @ weights)

    return step


def _work(to_main: socket.socket) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rng = np.random.default_rng(0)
    to_main.setblocking(False)
    busy = asleep = 0.0
    try:
        while True:
            try:
                name, _, value = to_main.recv(100).decode().partition(" ")
                busy, asleep = (float(value), asleep) if name == "slow-worker" else (
                    busy, float(value))  # fmt: skip
            except BlockingIOError:
                pass
            sample = rng.integers(0, 255, SAMPLE, np.uint8)
            _busy(busy)
            time.sleep(asleep)
            to_main.setblocking(True)
            to_main.sendall(sample.tobytes())
            to_main.setblocking(False)
    except (OSError, ValueError):
        pass
    finally:
        os._exit(0)


def serve(port: str, backend: str) -> Step:
    """Answers requests over HTTP, each with some computing and a question to a backend
    (HOST:PORT, '' for none). Its steps are requests."""
    matrix = np.random.default_rng(0).standard_normal((160, 160))
    local = threading.local()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = matrix
            for _ in range(12):
                answer = np.tanh(answer @ matrix)
            if backend:
                if not hasattr(local, "connection"):
                    local.connection = http.client.HTTPConnection(backend, timeout=30)
                    local.connection.connect()
                    local.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                local.connection.request("GET", "/")
                local.connection.getresponse().read()
            _own_faults(Path(sys.argv[2]).with_suffix(".log"))
            body = answer[:8].tobytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            STEPS.append(time.monotonic_ns())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=_obey, daemon=True).start()
    server.serve_forever()
    raise AssertionError


KINDS: dict[str, Callable[..., Step]] = {
    "train": train,
    "opencl": opencl,
    "read": read,
    "loader": loader,
    "serve": serve,
}

if __name__ == "__main__":
    main()
