# SPDX-License-Identifier: Apache-2.0
"""Runs one program: with its cause and without, traced by torch.profiler and watched by Sonde.

`run_group` forks children from this process, which has imported PyTorch but not touched the device,
so that a run costs its own second and not the imports'. A run leaves `trace.json` (Kineto, the
steps with the cause), `off.json` (without) and `truth.json` in its folder, a group one capture of
the machine's waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
TRACED_S = 0.6
LEAST_STEPS = 10
"""However long they take: three steps do not show a period."""
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of the programs. By default JAX takes three quarters of the device memory, too much
for programs beside it and for the profiler."""
CORES = range(8)
"""CPUs of the programs. The analysis of their traces runs on others meanwhile."""


@dataclass
class Child:
    """A forked program and the pipes to it."""

    kind: str
    seed: int
    folder: Path
    disturber: Disturber
    pid: int = 0
    inward: int = -1
    outward: int = -1


def run_group(runs: list[tuple[str, int]], folder: Path) -> list[dict[str, Any]]:
    """Several runs: they warm up together, then are measured one after another."""
    from bench.explain.every_program import KINDS

    folder.mkdir(parents=True, exist_ok=True)
    capture = folder / f"waits-{runs[0][0]}-{runs[0][1]}.sonde"
    with contextlib.ExitStack() as stack:
        children = []
        for kind, seed in runs:
            here = folder / f"{kind}-{seed}"
            here.mkdir(exist_ok=True)
            disturber = stack.enter_context(disturbing(KINDS[kind].disturber))
            children.append(Child(kind, seed, here, disturber))
        for child in children:
            _fork(child, children)
            stack.callback(_reap, child)
        sonde = record(capture, {"SONDE_WAIT_SPAN_MS": "0.1", "SONDE_TICK_S": "0.1"}, "--no-device")
        stack.callback(finish, sonde)
        deadline = time.monotonic() + LIMIT_S
        waiting = [child for child in children if _receive(child, deadline) == b"r"]
        for child in waiting:
            with contextlib.suppress(OSError):
                _run_protocol(child)
        sonde.send_signal(signal.SIGINT)
    truths = []
    for child in children:
        path = child.folder / "truth.json"
        truth = json.loads(path.read_text()) if path.exists() else {"error": "no truth"}
        truth |= {"kind": child.kind, "seed": child.seed, "pid": child.pid}
        truth["waits"] = capture.name
        path.write_text(json.dumps(truth))
        truths.append(truth)
    return truths


def _fork(child: Child, others: list[Child]) -> None:
    from_parent, child.outward = os.pipe()
    child.inward, to_parent = os.pipe()
    child.pid = os.fork()
    if not child.pid:
        for other in others:
            for end in (other.inward, other.outward):
                if end >= 0:
                    os.close(end)
        _child(child.kind, child.seed, child.folder, from_parent, to_parent)
    os.close(from_parent)
    os.close(to_parent)


def _reap(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.inward)
    os.close(child.outward)


def record(capture: Path, settings: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """`sonde record` into a file, with its output in a log beside it."""
    command = [sys.executable, "-m", "sonde", "record", *options, "-q", "-f", "-o", str(capture)]
    with capture.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)


def finish(recorder: subprocess.Popen[bytes]) -> None:
    """Wait for its end, but not for ever."""
    try:
        recorder.wait(20)
    except subprocess.TimeoutExpired:
        recorder.kill()
        recorder.wait()


def _receive(child: Child, deadline: float) -> bytes:
    """The next message of the child, b'' if it died or took too long. Disturbs meanwhile."""
    os.set_blocking(child.inward, False)
    while time.monotonic() < deadline:
        try:
            return os.read(child.inward, 1)
        except BlockingIOError:
            child.disturber.tick(child.pid)
    return b""


def _run_protocol(child: Child) -> None:
    """Through its measurement. It writes 'r' when it is ready, '+' to be disturbed from now on, '-'
    for no more, 'e' at its end; each but the last is answered by 'k', after which it goes on."""
    deadline = time.monotonic() + LIMIT_S
    os.write(child.outward, b"k")
    while (message := _receive(child, deadline)) in (b"+", b"-"):
        if message == b"+":
            child.disturber.start(child.pid)
        else:
            child.disturber.stop(child.pid)
        os.write(child.outward, b"k")
    child.disturber.stop(child.pid)


class Disturber:
    """What interferes with a program while its cause is to be there; this one does nothing."""

    def tick(self, child: int) -> None:
        time.sleep(0.001)

    def start(self, child: int) -> None: ...

    def stop(self, child: int) -> None: ...

    def close(self) -> None: ...


class CpuCompetitor(Disturber):
    """Busy processes on the child's one core."""

    def __init__(self, count: int = 3) -> None:
        self.competitors = []
        core = max(CORES)
        for _ in range(count):
            competitor = os.fork()
            if not competitor:
                os.sched_setaffinity(0, {core})
                os.kill(os.getpid(), signal.SIGSTOP)
                while True:
                    sum(range(10_000))
            self.competitors.append(competitor)
        self.core = core

    def start(self, child: int) -> None:
        for task in Path(f"/proc/{child}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {self.core})
        for competitor in self.competitors:
            os.kill(competitor, signal.SIGCONT)

    def stop(self, child: int) -> None:
        for competitor in self.competitors:
            os.kill(competitor, signal.SIGSTOP)

    def close(self) -> None:
        for competitor in self.competitors:
            os.kill(competitor, signal.SIGKILL)
            os.waitpid(competitor, 0)


class Quota(Disturber):
    """A CPU quota, as a container gets it: half a core."""

    def __init__(self) -> None:
        self.group: Path | None = None
        for root, file in (
            (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"),
            (Path("/sys/fs/cgroup/cpu,cpuacct"), "cpu.cfs_quota_us"),
            (Path("/sys/fs/cgroup/unified"), "cpu.max"),
            (Path("/sys/fs/cgroup"), "cpu.max"),
        ):
            group = root / f"explain{os.getpid()}"
            try:
                if not root.is_dir():
                    continue
                group.mkdir(exist_ok=True)
                if not (group / file).exists():
                    (root / "cgroup.subtree_control").write_text("+cpu")
                if (group / file).exists():
                    self.group, self.file = group, group / file
                    break
            except OSError:
                continue
        if self.group is None:
            raise RuntimeError("no cgroup with a CPU quota here")

    def start(self, child: int) -> None:
        assert self.group
        (self.group / "cgroup.procs").write_text(str(child))
        self.file.write_text("50000" if "quota" in self.file.name else "50000 100000")

    def stop(self, child: int) -> None:
        self.file.write_text("-1" if "quota" in self.file.name else "max 100000")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self.group
            self.group.rmdir()


class Stopper(Disturber):
    """SIGSTOP for 12 ms of every 30, as debuggers, checkpointers and freezers do."""

    active = False

    def tick(self, child: int) -> None:
        if not self.active:
            time.sleep(0.001)
            return
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.012)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.018)

    def start(self, child: int) -> None:
        self.active = True

    def stop(self, child: int) -> None:
        self.active = False


class GpuCompetitor(Disturber):
    """Another process that keeps the same GPU busy."""

    def __init__(self) -> None:
        self.competitor = os.fork()
        if not self.competitor:
            import torch

            a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
            a @ a
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                for _ in range(10):
                    a @ a
                torch.cuda.synchronize()

    def start(self, child: int) -> None:
        os.kill(self.competitor, signal.SIGCONT)

    def stop(self, child: int) -> None:
        os.kill(self.competitor, signal.SIGSTOP)

    def close(self) -> None:
        os.kill(self.competitor, signal.SIGKILL)
        os.waitpid(self.competitor, 0)


_DISTURBERS = {
    "": Disturber,
    "cpu": CpuCompetitor,
    "gpu": GpuCompetitor,
    "stop": Stopper,
    "quota": Quota,
}


@contextlib.contextmanager
def disturbing(name: str) -> Iterator[Disturber]:
    disturber = _DISTURBERS[name]()
    try:
        yield disturber
    finally:
        disturber.close()


def _child(kind: str, seed: int, folder: Path, inward: int, outward: int) -> None:
    """The forked process: never returns."""
    truth: dict[str, Any]
    os.environ.update(SETTINGS)
    code = 0
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, set(CORES) & os.sched_getaffinity(0))

    def send(message: bytes) -> None:
        os.write(outward, message)
        os.read(inward, 1)

    try:
        truth = _measure(kind, seed, folder, send)
    except BaseException:
        traceback.print_exc()
        truth = {"error": traceback.format_exc(limit=3)}
        code = 1
    (folder / "truth.json").write_text(json.dumps(truth))
    os.write(outward, b"e")
    os._exit(code)


def _measure(kind: str, seed: int, folder: Path, send: Callable[[bytes], None]) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from bench.explain.every_program import built

    threads = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    marks = [("start", time.monotonic())]

    def timed(step: Any, limit: int) -> tuple[float, list[int]]:
        """Seconds a step, and when each began (time since 1970; the last one's end comes last).

        Until TRACED_S have passed or `limit` is reached.
        """
        torch.cuda.synchronize()
        began = time.perf_counter()
        stamps: list[int] = []
        while len(stamps) < limit and (
            len(stamps) < LEAST_STEPS or time.perf_counter() - began < TRACED_S
        ):
            stamps.append(time.time_ns())
            step()
        stamps.append(time.time_ns())
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / (len(stamps) - 1), stamps

    with built(kind, seed) as work:
        for step in (work.on, work.off or work.on):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        with profile(activities=threads, with_stack=True):  # the first one sets up the tracer
            work.on()
            torch.cuda.synchronize()
        marks.append(("warm", time.monotonic()))
        send(b"r")
        work.before_on()
        if work.disturb:
            send(b"+")
        with profile(activities=threads, with_stack=True) as profiler:
            on_s, stamps = timed(work.on, work.steps)
        if work.disturb:
            send(b"-")
        marks.append(("on", time.monotonic()))
        # Before any later session: it takes the records of this one away.
        profiler.export_chrome_trace(str(folder / "trace.json"))
        marks.append(("export", time.monotonic()))
        work.before_off()
        off_s, stamps_off = 0.0, list[int]()
        if work.off is not None:
            with profile(activities=threads, with_stack=True) as profiler:
                off_s, stamps_off = timed(work.off, len(stamps) - 1)
            profiler.export_chrome_trace(str(folder / "off.json"))
        marks.append(("off", time.monotonic()))
        return {
            "parameters": work.parameters,
            "steps": len(stamps) - 1,
            "stamps_ns": stamps,
            "stamps_off_ns": stamps_off,
            "step_on_s": on_s,
            "step_off_s": off_s,
            "took": {b[0]: round(b[1] - a[1], 2) for a, b in itertools.pairwise(marks)},
        }
