# SPDX-License-Identifier: Apache-2.0
"""Control groups of trials, for CPU time and for freezing, in either version."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path

NAME = "sonde-faults-gpu"
PERIOD_US = 100_000


class Groups:
    """All groups of a run; where this machine has no controller and mounts none, none are made."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self.version = 0
        """Of control groups; 0: none."""
        self._cpu = self._find("cpu")
        self._freezer = self._find("freezer") if self.version == 1 else self._cpu

    def _find(self, controller: str) -> Path | None:
        """The folder of a hierarchy with this controller."""
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind, options = line.split()[:4]
            if kind == "cgroup" and controller in options.split(","):
                self.version = 1
                return Path(point)
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind = line.split()[:3]
            root = Path(point)
            if kind == "cgroup2" and controller in (root / "cgroup.controllers").read_text():
                self.version = 2
                with contextlib.suppress(OSError):
                    (root / "cgroup.subtree_control").write_text(f"+{controller}")
                    return root
        point = tempfile.mkdtemp(prefix=f"sonde-{controller}-")
        command = ["mount", "-t", "cgroup", "-o", controller, "none", point]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            self.version = 1
            return Path(point)
        Path(point).rmdir()
        return None

    @property
    def has_quota(self) -> bool:
        """Whether CPU time can be limited."""
        return self._cpu is not None

    def group(self, name: str) -> Path | None:
        """A group for CPU time; `name`: LANE/PART."""
        return self._below(self._cpu, name)

    def _below(self, root: Path | None, name: str) -> Path | None:
        if root is None:
            return None
        path = root
        for part in (NAME, *name.split("/")):
            if self.version == 2 and path != root:
                with contextlib.suppress(OSError):
                    (path / "cgroup.subtree_control").write_text("+cpu")
            path = path / part
            if not path.exists():
                path.mkdir()
            if path not in self._made:
                self._made.append(path)
        return path

    def enter(self, name: str) -> None:
        """Move the calling process into a group; for use between fork and exec."""
        if (path := self.group(name)) is not None:
            (path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, name: str, cpus: float) -> None:
        """Set a quota, in CPUs; 0 takes it back."""
        path = self.group(name)
        if path is None:
            raise RuntimeError("no control group for CPU time")
        quota = str(max(1000, int(cpus * PERIOD_US))) if cpus else ""
        if self.version == 1:
            (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (path / "cpu.cfs_quota_us").write_text(quota or "-1")
        else:
            (path / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")

    def freeze(self, name: str, pids: list[int]) -> bool:
        """Freeze processes by their group; False where there is no such controller."""
        path = self._below(self._freezer, name)
        if path is None:
            return False
        if self.version == 1:
            for pid in pids:
                (path / "cgroup.procs").write_text(str(pid))
            (path / "freezer.state").write_text("FROZEN")
        else:
            (path / "cgroup.freeze").write_text("1")
        return True

    def thaw(self, name: str) -> None:
        """The reverse."""
        path = self._below(self._freezer, name)
        if path is not None and self.version == 1:
            (path / "freezer.state").write_text("THAWED")
        elif path is not None:
            (path / "cgroup.freeze").write_text("0")

    def close(self) -> None:
        """Remove all groups; their processes are gone, or about to be."""
        self._remove(list(self._made))

    def remove(self, name: str) -> None:
        """Remove the groups of one trial."""
        self._remove([path for path in list(self._made) if name in path.parts])

    def _remove(self, paths: list[Path]) -> None:
        until_s = time.monotonic() + 3
        for path in sorted(paths, key=lambda it: -len(it.parts)):
            while path.exists() and time.monotonic() < until_s:
                with contextlib.suppress(OSError):
                    path.rmdir()
                    break
                time.sleep(0.05)
