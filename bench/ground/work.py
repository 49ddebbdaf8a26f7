# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""PyTorch programs with a known number of kernels, and the script of one trial.

`work.py` runs as a zygote: it imports torch once, then forks one child per trial (a line of JSON on
standard input) and answers with how the child ended. CUDA is first touched in the child. Each child
ends by a normal interpreter exit, so that exit handlers are tried too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.profiler

ATTACH = Path(__file__).resolve().with_name("attach.py")
OPS = 100  # kernels a step
EAGER_TAIL = 5  # eager kernels after the graph in a decode step


def _sleep_often() -> None:
    for _ in range(100_000):
        time.sleep(0.01)


class Program:
    """One workload: `step()` launches a known number of kernels; `digest()` identifies what was computed."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        torch.manual_seed(7)
        self.x = torch.zeros(256, dtype=torch.int64, device=device)
        self.y = torch.rand(256, device=device)
        self.w = torch.rand(64, 64, device=device)
        self.n = 0
        self.replayed: Any = None
        self.kernels = OPS
        self.launches = OPS  # driver launches a step
        if name in ("graph", "decode"):
            self.launches = 1
            if name == "decode":
                self.kernels, self.launches = OPS + EAGER_TAIL, 1 + EAGER_TAIL
            if device == "cuda":
                self.capture()
        self.step: Callable[[], None] = getattr(self, name)
        for _ in range(20):
            self.step()
        self.sync()

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def ops(self) -> None:
        x, y = self.x, self.y
        for _ in range(OPS // 4):
            x.add_(1)
            y.mul_(0.999)
            y.add_(0.001)
            x.add_(2)

    def capture(self) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.ops()
        torch.cuda.synchronize()
        self.replayed = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.replayed):
            self.ops()

    def eager(self) -> None:
        self.ops()
        self.n += 1
        if self.n % 10 == 0:
            self.sync()

    def replay(self) -> None:
        if self.replayed is not None:
            self.replayed.replay()
        else:
            self.ops()

    def graph(self) -> None:
        self.replay()
        self.n += 1
        if self.n % 50 == 0:
            self.sync()

    def decode(self) -> None:
        self.replay()
        for _ in range(EAGER_TAIL):
            self.y.add_(0.001)
        self.n += 1
        self.sync()

    def digest(self) -> str:
        self.sync()
        data = self.x.cpu().numpy().tobytes() + self.y.cpu().numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16]


class Trial:
    """Runs the script of one trial and writes what happened."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.base = f"/tmp/ground-{os.getpid()}"
        self.stamps: list[int] = []
        self.marks: list[tuple[str, int, int]] = []  # label, first step, one past the last
        self.sessions: list[dict[str, Any]] = []
        self.out: dict[str, Any] = {"kids": []}
        self.sent = 0
        self.fifos: list[int] = []

    def steps(self, n: int, label: str) -> None:
        first = len(self.stamps)
        step, stamps, clock = self.program.step, self.stamps, time.monotonic_ns
        for _ in range(n):
            stamps.append(clock())
            step()
        self.program.sync()
        stamps.append(clock())
        self.marks.append((label, first, len(stamps) - 1))

    def attach(self) -> None:
        """As Sonde attaches, while the loop goes on."""
        bins = self.cell["bins"]
        t = time.monotonic_ns()
        command = [sys.executable, str(ATTACH), str(os.getpid()), f"{bins}/windows.so"]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = len(self.stamps)
        while p.poll() is None:
            self.stamps.append(time.monotonic_ns())
            self.program.step()
        self.program.sync()
        self.stamps.append(time.monotonic_ns())
        self.marks.append(("attach", first, len(self.stamps) - 1))
        assert p.stdout
        self.out["attach"] = json.loads(p.stdout.read() or "{}")
        self.out["attach_ms"] = (time.monotonic_ns() - t) / 1e6
        if not self.out["attach"].get(
            "ok"
        ):  # the trial goes on with a plain load; the failure is on record
            self.loaded = ctypes.CDLL(f"{bins}/windows.so")

    def command(self, line: str) -> None:
        fd = os.open(f"{self.base}.fifo", os.O_RDWR | os.O_NONBLOCK)  # never waits for a reader
        os.write(fd, (line + "\n").encode())
        self.fifos.append(
            fd
        )  # kept open: a line without a reader would be lost with the last descriptor
        self.sent += 1

    def wait(self, limit_s: float = 8.0) -> None:
        """Keeps stepping until the library has done every line sent."""
        until = time.monotonic() + limit_s
        first = len(self.stamps)
        while time.monotonic() < until:
            data = (
                Path(f"{self.base}.done").read_bytes()
                if Path(f"{self.base}.done").exists()
                else b""
            )
            if int.from_bytes(data[:8], "little") >= self.sent:
                break
            if self.cell.get("fixed"):
                time.sleep(0.002)
            else:
                self.stamps.append(time.monotonic_ns())
                self.program.step()
        else:
            self.out["stuck"] = True
        self.stamps.append(time.monotonic_ns())
        self.marks.append(("wait", first, len(self.stamps) - 1))

    def kineto(self, n: int) -> None:
        first = len(self.stamps)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.program.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        t = time.monotonic_ns()
        with torch.profiler.profile(activities=kinds) as p:
            for _ in range(n):
                self.stamps.append(time.monotonic_ns())
                self.program.step()
            self.program.sync()
        took = (time.monotonic_ns() - t) / 1e6
        self.stamps.append(time.monotonic_ns())
        self.marks.append(("kineto", first, len(self.stamps) - 1))
        kernels = strange = 0
        total = 0
        results = p.profiler.kineto_results if p.profiler else None
        for e in results.events() if results else []:
            if e.device_type() != torch.autograd.DeviceType.CUDA or e.name().startswith(
                ("Mem", "Activity")
            ):
                continue
            kernels += 1
            strange += not 0 < e.duration_ns() < 50_000_000
            total += e.duration_ns()
        self.sessions.append(
            {
                "steps": n,
                "kernels": kernels,
                "expected": n * self.program.kernels,
                "strange": strange,
                "mean_ns": total / kernels if kernels else 0,
                "ms": took,
                "begin": t,
            }
        )

    def fork(self, n: int) -> None:
        for i in range(n):
            kid = os.fork()
            if kid == 0:
                if i % 2:
                    os._exit(7)
                import decimal  # noqa: F401  a library loaded in the child
                import sqlite3  # noqa: F401

                sys.exit(7)
            deadline = time.monotonic() + 10
            status = 0
            while time.monotonic() < deadline:
                got, status = os.waitpid(kid, os.WNOHANG)
                if got:
                    break
                self.stamps.append(time.monotonic_ns())
                self.program.step()
            else:
                os.kill(kid, signal.SIGKILL)
                os.waitpid(kid, 0)
                status = -1
            self.out["kids"].append(os.waitstatus_to_exitcode(status) if status >= 0 else "hang")

    def run(self) -> None:
        cell = self.cell
        os.environ.update(cell.get("env", {}))
        os.mkfifo(f"{self.base}.fifo")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":  # a rehearsal: the thread that CUDA's driver would have asleep in poll
            threading.Thread(target=_sleep_often, daemon=True).start()
        self.program = Program(cell["workload"], device)
        self.out.update(kernels=self.program.kernels, launches=self.program.launches, device=device)
        for op in cell["script"]:
            getattr(self, op[0])(*op[1:])
        # As many steps in all as every other trial of this workload, so that the digests must agree.
        rest = cell["total"] - self.program.n + 20
        for _ in range(rest):
            self.program.step()
        self.out.update(digest=self.program.digest(), steps=self.program.n, over=rest < 0)
        self.out.update(marks=self.marks, sessions=self.sessions)
        np.save(cell["out"] + ".stamps.npy", np.array(self.stamps, dtype=np.int64))
        Path(cell["out"] + ".work.json").write_text(json.dumps(self.out))
        if cell.get("exit_in_window"):
            self.command("windows kc 5000 10 1 r")
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                self.program.step()


def child(cell: dict[str, Any]) -> None:
    log = os.open(cell["out"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    faulthandler.enable()
    if not cell["mode"].startswith(
        "fork"
    ):  # its watchdog thread would be missing in a forked child
        faulthandler.dump_traceback_later(cell["timeout_s"] - 3, exit=False)
    Trial(cell).run()
    if not cell["mode"].startswith("fork"):
        faulthandler.cancel_dump_traceback_later()


def last_words(pid: int) -> dict[str, str]:
    """Where the threads of a hung child are."""
    calls_of = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            calls_of[f"{task.name} {name}"] = (task / "syscall").read_text().strip()[:60]
        except OSError:
            continue
    return calls_of


def zygote() -> None:
    for line in sys.stdin:
        cell = json.loads(line)
        t = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(cell)
            sys.exit(0)
        answer: dict[str, Any] = {"exit": "hang"}
        while time.monotonic() - t < cell["timeout_s"]:
            got, status = os.waitpid(pid, os.WNOHANG)
            if got:
                answer["exit"] = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.01)
            done = Path(cell["out"] + ".work.json")
            if done.exists() and time.time() - done.stat().st_mtime > 4:
                answer["exit"] = "exit hang"
                answer["threads"] = last_words(pid)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
        else:
            answer["threads"] = last_words(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for leaf in (f"/tmp/ground-{pid}.fifo", f"/tmp/ground-{pid}.done"):
            Path(leaf).unlink(missing_ok=True)
        answer["s"] = time.monotonic() - t
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    print(json.dumps({"ready": torch.__version__}), flush=True)
    zygote()
