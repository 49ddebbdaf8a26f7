# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.stacks`: which share of user stacks reaches the thread's entry, tool by tool.

Every tool samples the same programs, one after the other. A stack counts as whole where its
outermost frame is one in which threads begin. py-spy sees Python frames alone: there it is the
module's, or the thread's bootstrap.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.tools import require_root

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "programs" / "stacks"
HZ = 199
ENTRIES = ("_start", "clone", "__clone", "clone3", "__clone3", "runtime.goexit", "runtime.rt0_go")
THREAD_NAMES = ("process ", "thread ", "Thread-", "MainThread")
PYTHON_ENTRIES = ("<module>", "_bootstrap")

GO = """package main
//go:noinline
func inner(n int) int { s := 0; for i := 0; i < n; i++ { s += i ^ (s << 1) }; return s }
//go:noinline
func outer(n int) int { return inner(n) + 1 }
func main() { for t := 0; t != 42; { t += outer(10000) } }
"""
RUST = """use std::hint::black_box;
#[inline(never)] fn leaf(n: u64) -> u64 { (0..n).fold(0, |a, i| black_box(a ^ (i << 1))) }
#[inline(never)] fn by_closure(n: u64) -> u64 { (0..9).map(|i| leaf(n + i)).sum() }
fn main() { loop { black_box(by_closure(black_box(1000))); } }
"""
NODE = """function leaf(n){let s=0;for(let i=0;i<n;i++)s+=i*i%7;return s}
function map(){return [1,2,3].map(x=>leaf(2000+x))}
for(;;)map()
"""
NUMPY = """import numpy as np
a = np.random.rand(300, 300)
def step(x): return np.tanh(x @ a) / 300
def loop(x):
    while True: x = step(x); np.sort(x, axis=0)
loop(a)
"""


@dataclass(frozen=True, slots=True)
class Share:
    """Stacks that reach the entry, of all."""

    whole: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return "-"
        share = self.whole / self.total
        # Wilson's interval, 95 %
        z = 1.96
        middle = (share + z * z / (2 * self.total)) / (1 + z * z / self.total)
        reach = z * math.sqrt(share * (1 - share) / self.total + z * z / (4 * self.total**2))
        reach /= 1 + z * z / self.total
        low, high = max(0.0, middle - reach), min(1.0, middle + reach)
        return f"{100 * share:6.2f} % ({100 * low:.2f}-{100 * high:.2f}), {self.total}"


def programs(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, command) of those that can be built here; each runs for ever."""
    tree = folder / "tree"
    flags = ["-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"]
    source = PROGRAMS / "tree.cpp"
    if _built(["g++", *flags, "-o", str(tree), str(source), "-lpthread"]):
        yield "C++ depth 5", [str(tree), "600", "5"]
        yield "C++ depth 500", [str(tree), "600", "500"]
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
        if found:
            yield f"CPython {version}", [str(found[0]), str(PROGRAMS / "tree.py"), "600"]
    if not subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True).returncode:
        yield "CPython + numpy", [sys.executable, "-c", NUMPY]
    (folder / "loop.go").write_text(GO)
    if _built(["go", "build", "-o", str(folder / "go-loop"), str(folder / "loop.go")]):
        yield "Go", [str(folder / "go-loop")]
    (folder / "loop.rs").write_text(RUST)
    if _built(["rustc", "-O", "-o", str(folder / "rust-loop"), str(folder / "loop.rs")]):
        yield "Rust", [str(folder / "rust-loop")]
    if shutil.which("node"):
        (folder / "loop.js").write_text(NODE)
        yield "Node, perf map", ["node", "--perf-basic-prof", str(folder / "loop.js")]


def _built(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def sonde(pid: int, seconds: float, folder: Path) -> Share:
    """By the recorder and its capture."""
    from sonde.query.capture import read

    path = folder / "sonde.sonde"
    command = [sys.executable, "-m", "sonde", "record", "--force", "-p", str(pid)]
    command += ["-F", str(HZ), "-d", str(seconds), "--no-device", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    tables = read(path).tables
    whole = {it["stack_id"]: it["complete"] for it in tables["stack"].to_pylist()}
    rows = [it for it in tables["sample"].to_pylist() if it["kind"] == "cpu"]
    total = sum(it["weight_count"] for it in rows)
    reached = sum(it["weight_count"] for it in rows if whole.get(it["stack_id"]))
    return Share(int(reached), int(total))


def perf(pid: int, seconds: float, folder: Path, how: str) -> Share:
    """By perf record and perf script."""
    path = folder / "perf.data"
    command = ["perf", "record", "-q", "-e", "cpu-clock:u", "-F", str(HZ), "--call-graph", how]
    command += ["-p", str(pid), "-o", str(path), "--", "sleep", str(seconds)]
    subprocess.run(command, check=True, capture_output=True)
    script = ["perf", "script", "-i", str(path), "-F", "ip,sym", "--no-inline"]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    whole = total = 0
    for stack in said.split("\n\n"):
        frames = [line.split(None, 1)[-1].strip() for line in stack.splitlines() if line.strip()]
        if frames:
            total += 1
            whole += frames[-1].partition(".abi0")[0] in ENTRIES
    return Share(whole, total)


def py_spy(pid: int, seconds: float, folder: Path) -> Share:
    """By py-spy's raw format: one line a stack, its count last."""
    path = folder / "py-spy.txt"
    command = ["py-spy", "record", "-p", str(pid), "-d", str(round(seconds)), "-r", str(HZ)]
    command += ["-f", "raw", "-o", str(path), "--nonblocking"]
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode or not path.exists():
        return Share(0, 0)
    whole = total = 0
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        first = next((it for it in stack.split(";") if not it.startswith(THREAD_NAMES)), "")
        total += int(count)
        whole += int(count) * (_name(first) in PYTHON_ENTRIES)
    return Share(whole, total)


def _name(frame: str) -> str:
    """`_bootstrap` of "Thread._bootstrap (threading.py:1002)"."""
    return frame.partition(" ")[0].rpartition(".")[2]


def main() -> int:
    """Print the table. 1 where Sonde stays below its target or below a peer."""
    parser = argparse.ArgumentParser(prog="python -m bench.stacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="a tool and program")
    args = parser.parse_args()
    require_root()
    missed = 0
    print(f"{'':18} {'sonde':34} {'perf fp':34} {'perf dwarf':34} py-spy")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, command in programs(folder):
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
            )
            try:
                time.sleep(1)
                pid = process.pid
                shares = [
                    sonde(pid, args.seconds, folder),
                    perf(pid, args.seconds, folder, "fp"),
                    perf(pid, args.seconds, folder, "dwarf"),
                ]
                if "CPython" in what:
                    shares.append(py_spy(pid, args.seconds, folder))
            finally:
                process.kill()
                process.wait()
            print(f"{what:18} " + " ".join(f"{share!s:34}" for share in shares), flush=True)
            ours = shares[0]
            missed += ours.whole < 0.99 * ours.total
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
