# SPDX-License-Identifier: Apache-2.0
"""Starts `fuse_tenant.py` as an unprivileged user, and leaves nothing of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

TENANT = 65_533
ANOTHER = 65_532
LIMIT_S = 100
_DEVICE = os.makedev(10, 229)
_SERVER = Path(__file__).with_name("fuse_tenant.py")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One that others wait for by now."""

    mode: str
    kid: int
    """The process that makes others wait."""


@contextmanager
def tenant(
    mode: str, user: int = TENANT, limit_s: int = LIMIT_S, library: str = ""
) -> Iterator[Tenant]:
    """See `fuse_tenant.py` for the modes."""
    if "fuse" not in Path("/proc/filesystems").read_text():
        pytest.skip("the kernel has no FUSE")
    folder = Path(tempfile.mkdtemp(prefix=f"sonde-hang-{mode}-", dir="/tmp"))
    folder.chmod(0o755)
    device, mount, script = folder / "fuse", folder / "mnt", folder / "tenant.py"
    os.mknod(device, 0o20666, _DEVICE)
    device.chmod(0o666)
    mount.mkdir()
    os.chown(mount, user, user)
    script.write_bytes(_SERVER.read_bytes())
    script.chmod(0o644)
    command = ["/usr/bin/python3", str(script), mode, str(limit_s), str(mount), str(device)]
    command += [library] if library else []
    process = subprocess.Popen(
        command, user=user, group=user, extra_groups=[], stdout=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == ["tenant"], "it could not begin"
        pids = [int(words[3]), int(words[5])]
        time.sleep(0.3)
        yield Tenant(mode, pids[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        assert _are_gone(pids)
        for path in (device, script):
            path.unlink()
        mount.rmdir()
        folder.rmdir()


def _are_gone(pids: list[int]) -> bool:
    """Each is killed, if need be, and waited for: what stays makes everybody wait."""
    deadline_s = time.monotonic() + 10
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
