# SPDX-License-Identifier: Apache-2.0
"""What a real agent sees under given restrictions, of real programs of another user."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sonde.query.capture import read
from sonde.query.session import Session

SONDE = str(Path(sys.executable).with_name("sonde"))
PROGRAMS = Path(__file__).parent / "programs"
NOBODY = 65534
PYTHON = "/usr/bin/python3"
PATIENCE_S = 10.0

SPIN = """
static volatile unsigned long turns;
void __attribute__((noinline)) {name}(void) {{ for (int i = 0; i < 1000; i++) turns++; }}
int main(void) {{ for (;;) {name}(); }}
"""
WAIT = """
import os, time
def sleeps_in_python():
    while True:
        time.sleep(0.01)
        os.stat("/")
        sum(range(50_000))
sleeps_in_python()
"""
READS = """
import os
def reads_in_python():
    while True:
        with open("/dev/zero", "rb", 0) as file:
            file.read(1 << 20)
reads_in_python()
"""


@dataclass(frozen=True)
class Workload:
    """Programs of the user nobody."""

    open: int
    """Spins; anybody may read it."""
    closed: int
    """Spins; only its owner may read it."""
    deleted: int
    """Spins; its file is gone."""
    python: int
    kernel: int
    """Spends its time in the kernel."""
    device: int


@contextmanager
def workload(folder: Path) -> Iterator[Workload]:
    """Started, and ended afterwards. `folder` is one that nobody may enter."""
    programs: dict[str, list[str]] = {}
    for name, mode in (("open", 0o755), ("closed", 0o700), ("deleted", 0o755)):
        source = folder / f"{name}.c"
        source.write_text(SPIN.format(name=f"{name}_spins"))
        path = folder / name
        subprocess.run(["cc", "-O1", "-g", str(source), "-o", str(path)], check=True)
        os.chown(path, NOBODY, NOBODY)
        path.chmod(mode)
        programs[name] = [str(path)]
    copies = folder / "copies"
    source = PROGRAMS / "opencl" / "copies.c"
    subprocess.run(["cc", "-O1", str(source), "-o", str(copies), "-lOpenCL"], check=True)
    programs["python"] = [PYTHON, "-c", WAIT]
    programs["kernel"] = [PYTHON, "-c", READS]
    programs["device"] = ["sh", "-c", f"exec {copies} 1000000000"]
    started = {
        name: subprocess.Popen(
            ["nice", *command],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "POCL_CACHE_DIR": "/tmp"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name, command in programs.items()
    }
    time.sleep(0.3)
    (folder / "deleted").unlink()
    try:
        yield Workload(**{name: process.pid for name, process in started.items()})
    finally:
        for process in started.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


SETTINGS = {
    # When the library is in a program depends on how long the agent lives: `attaches` looks.
    "SONDE_DEVICE_TIME": "off",
    "SONDE_CHUNK_S": "1",
    "SONDE_HZ": "49",
}


def observe(
    prefix: Sequence[str],
    folder: Path,
    beside: Workload,
    seconds: float = 2.5,
    *,
    captures: bool = True,
) -> tuple[set[str], str]:
    """The features that work for an agent started behind `prefix`, and what it complained about."""
    capture = folder / "agent.sonde"
    capture.unlink(missing_ok=True)
    command = [*prefix, SONDE, "agent", "--prometheus", "127.0.0.1:0"]
    if captures:
        command += ["-o", str(capture)]
    agent = subprocess.Popen(command, env=os.environ | SETTINGS, stderr=subprocess.PIPE, text=True)
    assert agent.stderr is not None
    page, found, printed = "", None, ""
    while found is None and (line := agent.stderr.readline()):
        printed += line
        found = re.search(r"http://([0-9.:]+)/", line)
    if found:
        time.sleep(seconds)
        until_s = time.monotonic() + PATIENCE_S
        while len(set(_of_page(page))) < 2 and time.monotonic() < until_s:
            page = _page(found[1])
            time.sleep(0.5)
    agent.send_signal(signal.SIGTERM)
    printed += agent.communicate(timeout=60)[1]
    if not page:
        return set(), printed
    features = set(_of_page(page))
    if captures:
        features |= set(_of_capture(Session(read(capture)), beside))
    return features, printed


def attaches(prefix: Sequence[str], patience_s: float = 60.0) -> tuple[bool, str]:
    """Whether a program of another user can be given the library by a command behind `prefix`."""
    sleeper = subprocess.Popen(
        ["/usr/bin/sleep", "100"], user=NOBODY, group=NOBODY, extra_groups=[], env={}
    )
    try:
        done = subprocess.run(
            [*prefix, SONDE, "attach", str(sleeper.pid)],
            capture_output=True,
            text=True,
            timeout=patience_s,
        )
        mapped = "sonde" in Path(f"/proc/{sleeper.pid}/maps").read_text()
    finally:
        sleeper.kill()
        sleeper.wait()
    return done.returncode == 0 and mapped, done.stdout + done.stderr


def _of_page(page: str) -> Iterator[str]:
    if re.search(r"^system_", page, re.MULTILINE):
        yield "host metrics"
    if re.search(r"^process_", page, re.MULTILINE):
        yield "metrics of processes"


def _of_capture(session: Session, beside: Workload) -> Iterator[str]:
    def frames(pid: int) -> set[tuple[str, str]]:
        """(kind, name)"""
        known = session.rows("SELECT DISTINCT stack FROM sample WHERE pid = ?", [pid])
        return {(it.kind, it.name) for (stack,) in known for it in session.stacks[stack]}

    def named(pid: int, name: str) -> bool:
        return any(name in it for _, it in frames(pid))

    def calls(kind: str, *pids: int) -> bool:
        chosen = f"AND pid IN ({', '.join(map(str, pids))})" if pids else ""
        return bool(session.rows(f"SELECT 1 FROM activity WHERE kind = '{kind}' {chosen} LIMIT 1"))

    if session.rows("SELECT 1 FROM sample WHERE pid = ? LIMIT 1", [beside.open]):
        yield "samples"
    if named(beside.open, "open_spins"):
        yield "stacks"
    if named(beside.closed, "closed_spins"):
        yield "names in files that only their owner may read"
    if named(beside.deleted, "deleted_spins"):
        yield "names in deleted files"
    if named(beside.kernel, "reads_in_python"):
        yield "Python frames"
    if any(kind == "kernel" and not name.startswith("0x") for kind, name in frames(beside.kernel)):
        yield "kernel frames"
    if calls("blocked", beside.python):
        yield "waits"
    if calls("device"):
        yield "device calls"
    if session.rows("SELECT 1 FROM device_run LIMIT 1"):
        yield "device time, though it is off"
