# SPDX-License-Identifier: Apache-2.0
"""A small training job that behaves as a large one: NumPy feeds an OpenCL device.

A two-layer network learns to find which of ten noisy patterns it is shown. Per step: a batch is
loaded, copied to the device, run through the kernels in train.cl, and the loss is copied back and
waited for. One loader thread reads shards (files of samples) from disk, and decodes and prepares
the batches sample by sample: a common mistake, and the reason why this device waits. A reporter
thread wakes up every two seconds, and all three threads share one lock.

    python demo/train.py [--seconds 20] [--device PLATFORM_SUBSTRING]
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pyopencl as cl

FEATURES = 784
HIDDEN = 16
CLASSES = 10
BATCH = 256
SHARD_SAMPLES = 4096
SHARDS = 6
QUEUE_BATCHES = 2
LEARNING_RATE = np.float32(0.1)
KERNELS = Path(__file__).with_name("train.cl")


def name_thread() -> None:
    """Give this thread its name in the kernel, too (Python does so by itself from 3.14 on)."""
    name = threading.current_thread().name
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


class Dataset:
    """Shards on disk: noisy copies of one pattern a class, each sample compressed by itself.

    A shard is SHARD_SAMPLES labels (uint8), as many sizes (uint32), then the samples (zlib of
    FEATURES float32).
    """

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        patterns = rng.standard_normal((CLASSES, FEATURES), dtype=np.float32)
        self.shards = []
        for index in range(SHARDS):
            labels = rng.integers(0, CLASSES, SHARD_SAMPLES).astype(np.uint8)
            noise = rng.standard_normal((SHARD_SAMPLES, FEATURES), dtype=np.float32)
            packed = [zlib.compress(s.tobytes(), level=1) for s in patterns[labels] + 4 * noise]
            sizes = np.array([len(one) for one in packed], np.uint32)
            path = folder / f"shard-{index}.bin"
            path.write_bytes(labels.tobytes() + sizes.tobytes() + b"".join(packed))
            self.shards.append(path)

    def read(self, index: int) -> tuple[list[bytes], np.ndarray]:
        """Compressed samples and labels of one shard."""
        raw = self.shards[index % SHARDS].read_bytes()
        labels = np.frombuffer(raw, np.uint8, SHARD_SAMPLES)
        sizes = np.frombuffer(raw, np.uint32, SHARD_SAMPLES, offset=SHARD_SAMPLES)
        ends = 5 * SHARD_SAMPLES + np.cumsum(sizes, dtype=np.int64)
        packed = [raw[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return packed, labels


class Batches:
    """A bounded queue between the loader and the trainer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()
        self._closed = False

    def put(self, batch: tuple[np.ndarray, np.ndarray]) -> bool:
        """Wait for room, then add; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < QUEUE_BATCHES)
            if self._closed:
                return False
            self._ready.append(batch)
            self._changed.notify_all()
            return True

    def get(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for a batch."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def waiting(self) -> int:
        """How many batches are ready."""
        with self._changed:
            return len(self._ready)

    def close(self) -> None:
        """End the loader: it waits no longer, and puts nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def prepare(packed: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode, centre, scale and jitter one sample."""
    sample = np.frombuffer(zlib.decompress(packed), np.float32)
    centred = sample - sample.mean()
    scaled = centred / (centred.std() + np.float32(1e-6))
    return scaled + np.float32(0.05) * rng.standard_normal(FEATURES, dtype=np.float32)


def load(dataset: Dataset, batches: Batches, rng: np.random.Generator) -> None:
    """The loader thread: shard after shard, sample by sample."""
    name_thread()
    shard = 0
    while True:
        packed, labels = dataset.read(shard)
        shard += 1
        order = rng.permutation(SHARD_SAMPLES)
        for first in range(0, SHARD_SAMPLES, BATCH):
            chosen = order[first : first + BATCH]
            samples = np.stack([prepare(packed[index], rng) for index in chosen])
            time.sleep(0.002)  # as long as a small read from a remote store
            if not batches.put((samples, labels[chosen].astype(np.int32))):
                return


def report(batches: Batches, stop: threading.Event, progress: dict[str, float]) -> None:
    """The reporter thread: a line every two seconds."""
    name_thread()
    while not stop.wait(2.0):
        print(
            f"step {progress['step']:5.0f}  loss {progress['loss']:.4f}  "
            f"{batches.waiting()} of {QUEUE_BATCHES} batches ready",
            flush=True,
        )


class Network:
    """Weights and buffers on the device, and one training step."""

    def __init__(self, context: cl.Context, rng: np.random.Generator) -> None:
        self.queue = cl.CommandQueue(context)
        program = cl.Program(context, KERNELS.read_text()).build()
        self.forward = cl.Kernel(program, "forward_layer")
        self.softmax = cl.Kernel(program, "softmax_loss")
        self.backward = cl.Kernel(program, "backward_hidden")
        self.update = cl.Kernel(program, "update_weights")
        read_write = cl.mem_flags.READ_WRITE

        def weights(rows: int, columns: int) -> cl.Buffer:
            host = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)
            return cl.Buffer(context, read_write | cl.mem_flags.COPY_HOST_PTR, hostbuf=host)

        def buffer(*shape: int) -> cl.Buffer:
            return cl.Buffer(context, read_write, 4 * int(np.prod(shape)))

        self.first, self.second = weights(FEATURES, HIDDEN), weights(HIDDEN, CLASSES)
        self.inputs, self.labels = buffer(BATCH, FEATURES), buffer(BATCH)
        self.hidden, self.scores = buffer(BATCH, HIDDEN), buffer(BATCH, CLASSES)
        self.score_gradient, self.hidden_gradient = buffer(BATCH, CLASSES), buffer(BATCH, HIDDEN)
        self.losses = buffer(BATCH)
        self.host_losses = np.empty(BATCH, np.float32)

    def step(self, samples: np.ndarray, labels: np.ndarray) -> float:
        """Copy in, forward, backward, update, copy the loss out, wait. Returns the mean loss."""
        queue = self.queue
        # pyopencl waits for a copy when its event is freed: keep them until the step is done.
        copies = [
            cl.enqueue_copy(queue, self.inputs, samples, is_blocking=False),
            cl.enqueue_copy(queue, self.labels, labels, is_blocking=False),
        ]
        int32 = np.int32
        self.forward(
            queue, (BATCH, HIDDEN), None,
            self.inputs, self.first, self.hidden, int32(FEATURES), int32(HIDDEN), int32(1),
        )  # fmt: skip
        self.forward(
            queue, (BATCH, CLASSES), None,
            self.hidden, self.second, self.scores, int32(HIDDEN), int32(CLASSES), int32(0),
        )  # fmt: skip
        self.softmax(
            queue, (BATCH,), None,
            self.scores, self.labels, self.score_gradient, self.losses, int32(CLASSES),
        )  # fmt: skip
        self.backward(
            queue, (BATCH, HIDDEN), None,
            self.score_gradient, self.second, self.hidden, self.hidden_gradient,
            int32(HIDDEN), int32(CLASSES),
        )  # fmt: skip
        for weights, values, gradient, rows, columns in (
            (self.second, self.hidden, self.score_gradient, HIDDEN, CLASSES),
            (self.first, self.inputs, self.hidden_gradient, FEATURES, HIDDEN),
        ):
            self.update(
                queue, (rows, columns), None,
                weights, values, gradient, int32(BATCH), int32(rows), int32(columns),
                LEARNING_RATE,
            )  # fmt: skip
        copies.append(cl.enqueue_copy(queue, self.host_losses, self.losses, is_blocking=False))
        queue.finish()
        copies.clear()
        return float(self.host_losses.mean())


def choose(substring: str) -> cl.Context:
    """The first device of the first platform whose name contains `substring`."""
    for platform in cl.get_platforms():
        if substring.lower() in platform.name.lower():
            return cl.Context([platform.get_devices()[0]])
    raise SystemExit(f"no OpenCL platform is named like {substring!r}")


def main() -> None:
    """Train for the given time."""
    parser = argparse.ArgumentParser(description="A small OpenCL training job.")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--device", default="", help="part of an OpenCL platform's name")
    parser.add_argument("--ready", type=Path, help="file to create when the first step is done")
    parser.add_argument(
        "--threads", nargs=3, metavar=("TRAINER", "LOADER", "REPORTER"), help="their names"
    )
    args = parser.parse_args()

    trainer, loader, reporter = args.threads or ("", "loader", "reporter")
    if trainer:
        threading.current_thread().name = trainer
        name_thread()
    rng = np.random.default_rng(seed=1)
    progress = {"step": 0.0, "loss": float("nan")}
    batches, stop = Batches(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="sonde-demo-") as folder:
        dataset = Dataset(Path(folder), rng)
        loader_rng = np.random.default_rng(seed=2)
        threads = [
            threading.Thread(target=load, name=loader, args=(dataset, batches, loader_rng)),
            threading.Thread(target=report, name=reporter, args=(batches, stop, progress)),
        ]
        network = Network(choose(args.device), rng)
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + args.seconds
        try:
            while time.monotonic() < deadline:
                progress["loss"] = network.step(*batches.get())
                progress["step"] += 1
                if args.ready and progress["step"] == 1:
                    args.ready.touch()
        finally:
            stop.set()
            batches.close()
            for thread in threads:
                thread.join()
    print(f"done: {progress['step']:.0f} steps, loss {progress['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
