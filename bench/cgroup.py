# SPDX-License-Identifier: Apache-2.0
"""What a tool and its children use, as the kernel accounts it: CPU time, and memory with the
kernel's own (BPF maps, buffers), which no process's resident size shows."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_count = itertools.count()


class Cgroup:
    """A separate group, in version 1 (cpuacct, memory) or 2, whichever the machine runs."""

    def __init__(self) -> None:
        name = f"sonde-bench-{os.getpid()}-{next(_count)}"
        self._is_v1 = (_ROOT / "cpuacct").is_dir() and (_ROOT / "memory").is_dir()
        if self._is_v1:
            self._cpu, self._memory = _ROOT / "cpuacct" / name, _ROOT / "memory" / name
        else:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu +memory")
            self._cpu = self._memory = _ROOT / name
        for folder in {self._cpu, self._memory}:
            folder.mkdir()
        self.peak_bytes = 0

    def enter(self) -> None:
        """Move the calling process in; for use between fork and exec."""
        for folder in {self._cpu, self._memory}:
            (folder / "cgroup.procs").write_text("0")

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        if self._is_v1:
            return int((self._cpu / "cpuacct.usage").read_text()) / 1e9
        return _fields(self._cpu / "cpu.stat")["usage_usec"] / 1e6

    def look(self) -> None:
        """Note the memory in use: processes' and kernel's, without file pages, which the kernel
        takes back when it needs them."""
        name = "memory.usage_in_bytes" if self._is_v1 else "memory.current"
        used = int((self._memory / name).read_text())
        stat = _fields(self._memory / "memory.stat")
        files = stat.get("active_file", 0) + stat.get("inactive_file", 0)
        self.peak_bytes = max(self.peak_bytes, used - files)

    def close(self) -> None:
        """Remove it, once its processes are gone."""
        for folder in {self._cpu, self._memory}:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.02)


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
