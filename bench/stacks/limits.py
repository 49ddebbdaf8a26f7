# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.stacks.limits`: how long stacks take to get ready for, and to walk.

- **A library with over 300,000 unwind entries**, tabled by the helper process: its time and the
  most memory that it held, with nothing of the file in memory and no table on disk.
- **A process with 300 libraries**, from the first look at it until every table is in the kernel,
  none of them on disk before.
- **A walk of 60 frames**, Python's and C's by turns, by the histogram in the kernel program.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.stacks.programs import BUILT, HERE, interpreters
from bench.tools import require_root
from sonde import _native
from sonde.collect.cpu import CpuSampler
from sonde.collect.kernel import Kernel
from sonde.resolve import Resolver
from sonde.unwind import Unwinder
from sonde.unwind.table_cache import TableCache

ENTRIES = 300_000
LIBRARIES = 300
FRAMES = 60
LEVELS = 5
"""Of programs/nested.py: 60 frames and some more, by version."""
HZ = 997
STEP_US = 0.25
"""Of the kernel's histogram (bpf/unwind_state.h)."""
PATIENCE_S = 60
MAX_TABLE_S, MAX_TABLE_BYTES = 1.0, 100e6
MAX_READY_S = 3.0
MAX_MEDIAN_US, MAX_P99_US = 10.0, 40.0

_NO_CODE = 60
"""Files called *.so that are no libraries: N are spared for them."""
_MAPS = """\
import mmap, os, sys
kept = []
for line in sys.stdin:
    path, offset, size = line.rsplit(" ", 2)
    fd = os.open(path, os.O_RDONLY)
    kept.append(mmap.mmap(fd, int(size), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC,
                          offset=int(offset)))
    os.close(fd)
print("ready", flush=True)
while True:
    pass
"""
"""A process with code of many files mapped as the loader maps it; none of it runs."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the outcome."""

    text: str
    holds: bool


@contextmanager
def _running(command: list[str], text: str = "") -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _forget(path: str) -> None:
    """Have nothing of a file in memory, as far as the kernel lets go of it."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def large_library(folder: Path) -> Iterator[Figure]:
    """Tabled by the helper, as the agent has it done."""
    found = [*BUILT.glob("python-*/lib/python*/site-packages/**/*.so*")]
    found = sorted(found, key=lambda it: it.stat().st_size, reverse=True)[:1]
    for path in map(str, found):
        entries = _native.build_unwind_table(path, str(folder / "counted"))[0]
        if entries < ENTRIES:
            continue
        cache = TableCache(_new(folder / "large"))
        cache.warm_up()
        time.sleep(0.5)  # the helper is there, as it is on a machine where Sonde runs
        _forget(path)
        fd = os.open(path, os.O_RDONLY)
        began_s = time.monotonic()
        cache.request("large", fd)
        while not (done := cache.poll()):
            time.sleep(0.001)
            if time.monotonic() > began_s + PATIENCE_S:
                raise RuntimeError("the table was not made")
        took_s = time.monotonic() - began_s
        os.close(fd)
        if cache.find("large") is None:
            raise RuntimeError(f"no table was made of {path}: {done}")
        child = cache._child
        assert child is not None
        most_bytes = _peak_bytes(child.pid)
        cache.close()
        name = Path(path).name
        text = f"{name}, {entries:,} entries: tabled in {took_s:.2f} s, {most_bytes / 1e6:.0f} MB"
        yield Figure(text, took_s <= MAX_TABLE_S and most_bytes <= MAX_TABLE_BYTES)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def many_libraries(folder: Path) -> Iterator[Figure]:
    """A process that has them mapped, loaded into the kernel."""
    paths = [*Path("/usr/lib").glob("**/*.so*"), *BUILT.glob("python-*/lib/**/*.so*")]
    real = sorted({it.resolve() for it in paths if it.is_file()}, key=lambda it: it.stat().st_size)
    spread = real[:: -max(1, len(real) // (LIBRARIES + _NO_CODE))]  # from the largest one on
    found = (line for path in spread if (line := _code_of(str(path))))
    mapped = "".join(islice(found, LIBRARIES))
    with _running([sys.executable, "-c", _MAPS], mapped) as process:
        assert process.stdout is not None
        process.stdout.readline()
        files = {line.split()[4] for line in _mapped_code(process.pid)}
        with _watched(process.pid, folder / "many", {}) as it:
            took_s = it.settle(process.pid)
            held = it.unwinder.usage()
    text = f"a process with {len(files)} files of code: ready in {took_s:.2f} s, "
    text += f"{held['tables']} tables, {held['table_bytes'] / 1e6:.0f} MB in the kernel"
    yield Figure(text, took_s <= MAX_READY_S and len(files) >= LIBRARIES)


def _code_of(path: str) -> str:
    """'path offset size' of the code that the loader would map; '' where it is no library."""
    done = subprocess.run(["readelf", "-lW", path], capture_output=True, text=True, check=False)
    found = re.search(r"^\s+LOAD\s+(\w+) \w+ \w+ (\w+) \w+ R E", done.stdout, flags=re.MULTILINE)
    if done.returncode or not found or " " in path:
        return ""
    offset = int(found[1], 16)
    start = offset // 4096 * 4096
    return f"{path} {start} {offset - start + int(found[2], 16)}\n"


def _mapped_code(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "x" in line.split()[1] and "/" in line]


@dataclass(frozen=True, slots=True)
class _Watch:
    """The sampler and the unwinder over one process, without the rest of the agent."""

    kernel: Kernel
    sampler: CpuSampler
    unwinder: Unwinder

    def settle(self, pid: int) -> float:
        """Get ready for a process. Returns how long it took, in s."""
        began_s = time.monotonic()
        self.unwinder.expect([pid])
        while self.unwinder.is_busy and time.monotonic() < began_s + PATIENCE_S:
            self.unwinder.update()
            time.sleep(0.002)
        return time.monotonic() - began_s


@contextmanager
def _watched(pid: int, folder: Path, constants: dict[str, int]) -> Iterator[_Watch]:
    kernel = Kernel([pid])
    kernel._constants |= constants
    sampler = CpuSampler(kernel, HZ)
    resolver = Resolver(grace_ns=10**10)
    resolver.start()
    unwinder = Unwinder(kernel.unwind, resolver, TableCache(_new(folder)))
    try:
        yield _Watch(kernel, sampler, unwinder)
    finally:
        unwinder.close()
        resolver.close()


def long_walks(folder: Path, seconds: float) -> Iterator[Figure]:
    """Their time, in each interpreter of this machine."""
    for name, command in interpreters():
        with _running([*command, str(HERE / "nested.py"), str(LEVELS)]) as process:
            time.sleep(0.5)
            constants = {"cost_words": FRAMES}
            with _watched(process.pid, folder / name, constants) as it:
                it.settle(process.pid)
                before = it.unwinder._maps.cost()
                it.sampler.start()
                time.sleep(seconds)
                it.sampler.stop()
                spent = [b - a for a, b in zip(before, it.unwinder._maps.cost(), strict=True)]
                frames = _frames(it)
        yield _walks(name, spent, frames)


def _frames(it: _Watch) -> list[int]:
    """Of each stack that was seen; Python's are two words each."""
    seen = it.kernel.walks(list(it.sampler.drain(0, True).stacks))
    return [len(walk.user) - _python_frames(walk.user) for walk in seen]


def _python_frames(user: Sequence[int]) -> int:
    """The second word of a Python frame has the highest bit, too."""
    return sum(word >> 63 for word in user) // 2


def _walks(name: str, spent: list[int], frames: list[int]) -> Figure:
    total = sum(spent)
    median_us, p99_us = (_quantile(spent, share) for share in (0.5, 0.99))
    text = f"{name}: {total:,} walks of {statistics.median(frames):.0f} frames: "
    text += f"median {median_us:.2f} µs, p99 {p99_us:.2f} µs"
    return Figure(text, median_us <= MAX_MEDIAN_US and p99_us <= MAX_P99_US)


def _quantile(spent: list[int], share: float) -> float:
    """In µs: the upper end of the step that it falls into."""
    left = share * sum(spent)
    for step, count in enumerate(spent):
        left -= count
        if left <= 0:
            return STEP_US * (step + 1)
    return STEP_US * len(spent)


def main() -> int:
    """1 where a figure misses its target."""
    parser = argparse.ArgumentParser(prog="python -m bench.stacks.limits", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="of walks (default: %(default)s)")
    parser.add_argument("--only", default="library,process,walks")
    args = parser.parse_args()
    require_root()
    missed = False
    with tempfile.TemporaryDirectory(prefix="bench-limits-") as name:
        parts = {
            "library": large_library(Path(name)),
            "process": many_libraries(Path(name)),
            "walks": long_walks(Path(name), args.seconds),
        }
        for part in args.only.split(","):
            for figure in parts[part]:
                missed |= not figure.holds
                print(figure.text + ("" if figure.holds else "  (missed)"), flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
