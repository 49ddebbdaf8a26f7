# SPDX-License-Identifier: Apache-2.0
"""CPU that recordings of a process take: in the process, by the library's own thread, and outside.

    python -m bench.inside_cost PID [--times 3] [--seconds 6] [--out FILE]

Attaches, then records some times; the library must not have been in the process before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cgroup import Cgroup
from bench.tools import require_root
from sonde.collect.inject_memory import InjectMemory

SONDE = (sys.executable, "-m", "sonde")
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one attach or recording; CPU and wall time in s."""

    what: str
    inside_s: float
    """Of the library's thread, until it timed and 2 s longer."""
    inside_all_s: float
    """To the end of the recording, with reading what the device did."""
    outside_s: float
    wall_s: float
    ready_s: float
    armed_s: float
    """From the start of the command until launches are timed; 0: never."""
    hooks: int
    timed: int


class Watched:
    """The library's own account, looked at while a command runs."""

    def __init__(self, pid: int) -> None:
        self._memory = InjectMemory.find(pid)
        self.armed_s = 0.0
        self.armed_cpu_s = 0.0
        self.hooks = 0
        self._began_s, self._over = time.monotonic(), threading.Event()
        self._before = self._counts()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _counts(self) -> dict[str, int]:
        return self._memory.seen().counts if self._memory else {"self_ns": 0, "timed": 0}

    def _look(self) -> None:
        while self._memory and not self._over.wait(LOOK_S):
            counts, now_s = self._counts(), time.monotonic() - self._began_s
            self.hooks = max(self.hooks, counts["hooks"])
            is_new = counts["armed_ns"] > self._began_s * 1e9
            if is_new and not self.armed_s:
                self.armed_s = now_s
            if self.armed_s and now_s < self.armed_s + 2.0:
                self.armed_cpu_s = (counts["self_ns"] - self._before["self_ns"]) / 1e9

    def end(self) -> tuple[float, int]:
        """CPU s of the library's thread, launches timed."""
        self._over.set()
        self._thread.join()
        after = self._counts()
        timed = after["timed"] - self._before["timed"]
        return (after["self_ns"] - self._before["self_ns"]) / 1e9, timed


def cost_of(what: str, pid: int, command: list[str]) -> Cost:
    """Run a command beside the process."""
    group, watched, began_s, ready_s = Cgroup(), Watched(pid), time.monotonic(), 0.0
    process = subprocess.Popen(
        command, preexec_fn=group.enter, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "recording" in line:
            ready_s = time.monotonic() - began_s
    if process.wait():
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    wall_s = time.monotonic() - began_s
    inside_all_s, timed = watched.end()
    found = Cost(
        what, watched.armed_cpu_s, inside_all_s, group.cpu_s(), wall_s, ready_s,
        watched.armed_s, watched.hooks, timed,
    )  # fmt: skip
    group.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.inside_cost", description=__doc__)
    parser.add_argument("pid", type=int)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_root()
    costs = [cost_of("attach", args.pid, [*SONDE, "attach", str(args.pid)])]
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.times):
            command = [*SONDE, "record", "--json", "-d", str(args.seconds), "-p", str(args.pid)]
            command += ["-o", str(Path(name) / f"{number}.sonde")]
            costs.append(cost_of(f"record {number + 1}", args.pid, command))
    print("what       inside 2 s  inside all  outside    wall   ready   armed  hooks   timed")
    for it in costs:
        print(
            f"{it.what:10} {it.inside_s:8.3f} s {it.inside_all_s:9.3f} s {it.outside_s:6.2f} s"
            f" {it.wall_s:6.2f} s {it.ready_s:5.2f} s {it.armed_s:5.2f} s {it.hooks:6} {it.timed:7}"
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(it) for it in costs], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
