# SPDX-License-Identifier: Apache-2.0
"""Runs inside the machine: each step beside a program with a known truth; all goes to the console.

Lines that begin with MARK are read by `bench.distro_kernels.machine`. Nothing is judged here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@@sonde"
PROGRAMS = Path("/programs")
CAPTURES = Path("/tmp")
SONDE = [sys.executable, "-m", "sonde"]
SLOW = float(os.environ.get("SLOW", "1"))
"""Patience for a machine that is emulated, in its own seconds."""
STALL_S, STALLS_ALLOWED_S, ATTEMPTS = 0.3, 1.0, 3


def send(kind: str, body: str) -> None:
    sys.stdout.write(f"{MARK} {kind} {body}\n")
    sys.stdout.flush()


def send_file(name: str, path: Path) -> None:
    send("file", name)  # what came under this name before is replaced
    text = base64.b64encode(path.read_bytes()).decode()
    for start in range(0, len(text), 1000):
        send("data", f"{name} {text[start : start + 1000]}")


def run(*command: object, timeout_s: float = 120, text: str | None = None) -> dict[str, Any]:
    """A program run to its end: its code, its words, or that it was too slow."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(text, timeout=timeout_s * SLOW)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return {"code": None, "out": out, "err": f"not done after {timeout_s * SLOW:.0f} s: {err}"}
    return {"code": process.returncode, "out": out, "err": err, "pid": process.pid}


class Recorder:
    """`sonde record` with a program that is started beside it or by it."""

    def __init__(self, name: str, *flags: object) -> None:
        self.path = CAPTURES / f"{name}.sonde"
        self.path.unlink(missing_ok=True)
        words = [*SONDE, "record", "--json", "-o", str(self.path), *map(str, flags)]
        self.log = CAPTURES / f"{name}.err"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)

    def wait_until_attached(self) -> bool:
        deadline = time.monotonic() + 90 * SLOW
        while time.monotonic() < deadline and self.process.poll() is None:
            if "sonde: recording" in self.log.read_text():
                return True
            time.sleep(0.1)
        return False

    def end(self) -> dict[str, Any]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            out, _ = self.process.communicate(timeout=90 * SLOW)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, _ = self.process.communicate()
            out += "\nnot ended after its signal"
        return {"code": self.process.returncode, "out": out, "err": self.log.read_text()}


def record(name: str, flags: list[object], command: list[object], **more: Any) -> dict[str, Any]:
    """The recorder over the whole machine, and beside it a program that prints its truth."""
    recorder = Recorder(name, *flags)
    ready = recorder.wait_until_attached()
    program = run(*command, **more) if ready else {}
    outcome = recorder.end()
    if recorder.path.exists():
        send_file(f"{name}.sonde", recorder.path)
    return {**outcome, "program": program}


def doctor() -> dict[str, Any]:
    return run(*SONDE, "doctor", "--json")


def samples() -> dict[str, Any]:
    """At the rate that is the default: an emulated timer that is asked for more falls behind."""
    return record("samples", ["--no-device", "--no-offcpu"], [PROGRAMS / "share", 10])


def stacks() -> dict[str, Any]:
    """Met before, so that its tables are made: until then frame pointers lead."""
    tree = PROGRAMS / "tree"
    recorder = Recorder("stacks", "--no-device", "--no-offcpu", "-F", 199)
    outcome: dict[str, Any] = {}
    if recorder.wait_until_attached():
        outcome = run(tree, 8, 5)
    return finish(recorder, "stacks", outcome)


def python() -> dict[str, Any]:
    words: list[object] = [sys.executable, PROGRAMS / "tree.py", 8]
    return record("python", ["--no-device", "--no-offcpu", "-F", 199], words)


def waits() -> dict[str, Any]:
    return record("waits", ["--no-device"], [PROGRAMS / "waits", 6])


def finish(recorder: Recorder, name: str, program: dict[str, Any]) -> dict[str, Any]:
    outcome = recorder.end()
    if recorder.path.exists():
        send_file(f"{name}.sonde", recorder.path)
    return {**outcome, "program": program}


def held(name: str, flags: list[object], command: list[object], before_s: float) -> dict[str, Any]:
    """A program that waits for a line on its standard input, then does what it is to be seen at."""
    words = [str(word) for word in command]
    program = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    program.stdout.readline()
    recorder = Recorder(name, "-p", program.pid, *flags)
    ready = recorder.wait_until_attached()
    time.sleep(before_s * SLOW)
    try:
        out, err = program.communicate("go\n" if ready else None, timeout=60 * SLOW)
    except subprocess.TimeoutExpired:
        program.kill()
        out, err = program.communicate()
    report = {"code": program.returncode, "out": out, "err": err, "pid": program.pid}
    return finish(recorder, name, report)


def device_calls() -> dict[str, Any]:
    flags: list[object] = ["--no-offcpu", "--no-device-time"]
    return held("device_calls", flags, [PROGRAMS / "copies", 3000, "hold"], 3)


def device_time() -> dict[str, Any]:
    """A program on the stub of a driver, with the library given to it at its start."""
    recorder = Recorder("device_time", "--no-offcpu", "--", PROGRAMS / "launches", 4)
    try:
        out, _ = recorder.process.communicate(timeout=90 * SLOW)
    except subprocess.TimeoutExpired:
        return finish(recorder, "device_time", {})
    if recorder.path.exists():
        send_file("device_time.sonde", recorder.path)
    err = recorder.log.read_text()
    return {"code": recorder.process.returncode, "out": out, "err": err, "program": {"out": out}}


SLEEPS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.02)"


def attach() -> dict[str, Any]:
    """Into a Python program that sleeps; it must live on, and be left again."""
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    pid = str(sleeper.pid)
    outcome = run(*SONDE, "attach", "--json", pid)
    maps = Path(f"/proc/{pid}/maps")
    loaded = "sonde-inject" in maps.read_text() if maps.exists() else False
    left = run(*SONDE, "detach", pid)
    time.sleep(0.5)
    alive = sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    return {**outcome, "loaded": loaded, "left": left, "alive": alive}


def dump() -> dict[str, Any]:
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    outcome = run(*SONDE, "dump", sleeper.pid, "--json")
    sleeper.kill()
    sleeper.wait()
    return outcome


def usage() -> dict[str, Any]:
    """The kernel's own counts by process, beside a program that counts its CPU time."""
    flags: list[object] = ["--no-device", "--no-offcpu", "--host"]
    return record("usage", flags, [PROGRAMS / "share", 3])


def syscalls() -> dict[str, Any]:
    words: list[object] = ["dd", "if=/dev/zero", "of=/dev/null", "bs=1", "count=20000"]
    return record("syscalls", ["--no-device", "--no-offcpu", "--syscalls"], words)


def memory() -> dict[str, Any]:
    words: list[object] = [PROGRAMS / "memory", "grow", 100, 5000]
    return record("memory", ["--no-device", "--no-offcpu", "--memory"], words, text="go\nend\n")


def default() -> dict[str, Any]:
    """As people start it: everything that is on by default, over the whole machine."""
    return record("default", [], [PROGRAMS / "share", 3])


STEPS: tuple[Callable[[], dict[str, Any]], ...] = (
    doctor, default, samples, stacks, python, waits, device_calls, device_time, attach, dump,
    usage, syscalls, memory,
)  # fmt: skip


class Stalls(threading.Thread):
    """How long a processor stood still: it is a thread of a host that may be busy otherwise."""

    def __init__(self, cpu: int) -> None:
        super().__init__(daemon=True)
        self._cpu = cpu
        self._over = threading.Event()
        self.seconds = 0.0

    def run(self) -> None:
        os.sched_setaffinity(0, {self._cpu})  # of this thread
        before = time.monotonic()
        while not self._over.wait(0.02):
            now = time.monotonic()
            if now - before > STALL_S:
                self.seconds += now - before
            before = now

    def end(self) -> float:
        self._over.set()
        self.join()
        return self.seconds


def observe(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One step; again, where the machine stood still meanwhile."""
    for attempt in range(1, ATTEMPTS + 1):
        began, before = time.monotonic(), len(kernel_complaints())
        stalls = [Stalls(cpu) for cpu in range(os.cpu_count() or 1)]
        for stall in stalls:
            stall.start()
        try:
            outcome = step()
        except Exception:
            outcome = {"code": None, "out": "", "err": traceback.format_exc()}
        outcome["stalled_s"] = sum(stall.end() for stall in stalls)
        outcome["attempt"] = attempt
        outcome["seconds"] = time.monotonic() - began
        outcome["kernel"] = kernel_complaints()[before:]
        if outcome["stalled_s"] < STALLS_ALLOWED_S:
            break
    return outcome


def kernel_complaints() -> list[str]:
    """Complaints in the log of the kernel."""
    found = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                with contextlib.suppress(BrokenPipeError):  # overwritten meanwhile
                    line = os.read(fd, 8192).decode(errors="replace").split("\n")[0]
                    if any(word in line for word in ("BUG:", "WARNING:", "Oops", "lockup", "rcu:")):
                        found.append(line.partition(";")[2])
    return found


def main() -> None:
    send("begin", os.uname().release)
    only = os.environ.get("ONLY", "")
    for step in STEPS:
        if only and step.__name__ not in only.split(","):
            continue
        send("step", json.dumps({"name": step.__name__, **observe(step)}))
    send("end", json.dumps({"release": os.uname().release, "machine": os.uname().machine}))


if __name__ == "__main__":
    main()
