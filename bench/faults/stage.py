# SPDX-License-Identifier: Apache-2.0
"""The stage of a trial: its processes, control groups, files, a separate network; all of it goes
at the end, whatever happened."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
GROUPS = Path("/sys/fs/cgroup")
SHARES = 262_144
"""Of the CPUs, for a trial's processes together: others work on this machine, too."""
FILE_BYTES = 192 << 20
DISK_FILE = Path("/var/tmp/sonde-faults.data")
NAMESPACE = "sonde-faults"
_libc = ctypes.CDLL(None, use_errno=True)


class Stage:
    """One trial."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="sonde-faults-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._groups: list[Path] = []
        self._mounts: list[Path] = []
        self.victim: subprocess.Popen[bytes] | None = None
        self.helpers: dict[str, subprocess.Popen[bytes]] = {}
        self.culprits: list[int] = []
        self.values: dict[str, object] = {}
        self.group("cpu", "")
        self.group("cpuacct", "")
        (GROUPS / "cpu/sonde-faults/cpu.shares").write_text(str(SHARES))

    def group(self, controller: str, name: str) -> Path:
        """A control group of version 1, below that of all trials."""
        path = GROUPS / controller / "sonde-faults" / name
        path.mkdir(parents=True, exist_ok=True)
        self._groups += [path] if path not in self._groups else []
        return path

    def start(
        self, script: str, *arguments: str, group: str, cpus: set[int] | None = None,
        netns: bool = False,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """A process in a separate group for CPU time."""
        folder = self.group("cpu", group)

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            (GROUPS / "cpuacct/sonde-faults/cgroup.procs").write_text(str(os.getpid()))
            if cpus:
                os.sched_setaffinity(0, cpus)

        inside = ["ip", "netns", "exec", NAMESPACE] if netns else []
        command = [*inside, sys.executable, str(HERE / f"{script}.py"), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=enter,
            stderr=(self.folder / f"{script}.err").open("ab"),
        )  # fmt: skip
        self._processes.append(process)
        return process

    def start_victim(self, kind: str, *arguments: str, cpus: set[int] | None = None) -> None:
        """The victim."""
        steps = str(self.folder / "steps")
        self.victim = self.start("victims", kind, steps, *arguments, group="victim", cpus=cpus)

    def send(self, process: subprocess.Popen[bytes] | None, text: str) -> None:
        """A command to a victim or a helper."""
        assert process is not None and process.stdin is not None
        stdin: IO[bytes] = process.stdin
        stdin.write(text.encode() + b"\n")
        stdin.flush()

    @property
    def pid(self) -> int:
        """Of the victim."""
        assert self.victim is not None
        return self.victim.pid

    def family(self) -> set[int]:
        """The victim and its children."""
        found = {self.pid}
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            found |= set(map(int, text.split()))
        return found

    def everybody(self) -> list[int]:
        """All processes of the trial."""
        return sorted({process.pid for process in self._processes} | self.family())

    def data(self) -> Path:
        """A file on the disk, made once."""
        if not DISK_FILE.exists() or DISK_FILE.stat().st_size != FILE_BYTES:
            block = os.urandom(1 << 20)
            with DISK_FILE.open("wb") as file:
                for _ in range(FILE_BYTES >> 20):
                    file.write(block)
                os.fsync(file.fileno())
        return DISK_FILE

    def mount_slow_files(self) -> Path:
        """A FUSE file system with the file in it."""
        point = self.folder / "mount"
        point.mkdir()
        server = self.start("slow_files", str(self.data()), str(point), group="server")
        self.helpers["files"] = server
        self._mounts.append(point)
        deadline = time.monotonic() + 10
        while not (point / "data").exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the file system did not come up")
            time.sleep(0.05)
        return point / "data"

    def network(self) -> None:
        """A namespace at the other end of a pair of interfaces: 10.77.0.1 here, .2 there."""
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)
        inside = ["ip", "netns", "exec", NAMESPACE]
        for command in (
            ["ip", "netns", "add", NAMESPACE],
            ["ip", "link", "add", "sf0", "type", "veth", "peer", "name", "sf1"],
            ["ip", "link", "set", "sf1", "netns", NAMESPACE],
            ["ip", "addr", "add", "10.77.0.1/24", "dev", "sf0"],
            ["ip", "link", "set", "sf0", "up"],
            [*inside, "ip", "addr", "add", "10.77.0.2/24", "dev", "sf1"],
            [*inside, "ip", "link", "set", "sf1", "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        self.values["network"] = True

    def steps(self) -> array.array[int]:
        """End the victim; when each of its steps ended."""
        assert self.victim is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            self.victim.terminate()
        found: array.array[int] = array.array("Q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.victim.wait(5)
        path = self.folder / "steps"
        if path.exists():
            found.frombytes(path.read_bytes())
        return found

    def answers(self) -> list[tuple[int, int]]:
        """End the client; when each request was due, and answered."""
        client = self.helpers["client"]
        client.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(5)
        found: array.array[int] = array.array("Q")
        path = self.folder / "answers"
        if path.exists():
            found.frombytes(path.read_bytes())
        return list(zip(found[::2], found[1::2], strict=True))

    def close(self) -> None:
        """Everything goes."""
        for process in reversed(self._processes):
            with contextlib.suppress(OSError):
                process.kill()
        for point in self._mounts:
            _libc.umount2(str(point).encode(), 2)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if "network" in self.values:
            subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", "sf0"], check=False, capture_output=True)
        deadline = time.monotonic() + 3
        for path in sorted(self._groups, key=lambda it: -len(it.parts)):
            while path.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    path.rmdir()
                    break
                time.sleep(0.05)
        for name in self.folder.iterdir():
            if name.is_file():
                name.unlink()
