# SPDX-License-Identifier: Apache-2.0
"""A process that keeps a folder of the kernel's locked, as a tenant can that of its control group,
or of its process in /proc.

getdents64() holds the folder's lock while it copies to a page that never arrives (userfaultfd
here; FUSE, or reads that a limit holds back, for a tenant). A mkdir() queues for it exclusively,
and every listing and every lookup of a name that is not cached waits behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT_S = 10
IS_ARM = platform.machine() == "aarch64"
USERFAULTFD, GETDENTS64, MKDIRAT = (282, 61, 34) if IS_ARM else (323, 217, 258)
AT_FDCWD = -100
UFFDIO_API, UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
UFFD_API, MODE_MISSING = 0xAA, 1


def group_mount() -> Path:
    """Where groups of version 2 are mounted, else any hierarchy; `/nowhere` without any."""
    from sonde import procfs

    mounts = sorted(procfs.group_mounts(), key=lambda it: "v2" not in it.controllers)
    return Path(mounts[0].point) if mounts else Path("/nowhere")


@contextmanager
def locked(*folders: Path) -> Iterator[subprocess.Popen[str]]:
    """Keep folders locked; the process that does, which is killed at the end."""
    command = [sys.executable, __file__, *map(str, folders)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        yield holder
    finally:
        holder.kill()
        holder.wait(LIMIT_S)
        assert holder.stdout is not None
        holder.stdout.close()


@contextmanager
def groups(*paths: str) -> Iterator[list[Path]]:
    """Control groups that this test makes, in this order."""
    made: list[Path] = []
    try:
        for path in paths:
            folder = group_mount() / path
            folder.mkdir()
            made.append(folder)
        yield made
    finally:
        until_s = time.monotonic() + LIMIT_S
        for folder in reversed(made):
            while folder.exists() and time.monotonic() < until_s:
                with suppress(OSError):  # a process of it has not quite ended
                    folder.rmdir()
                    break
                time.sleep(0.05)


def _hold(folders: list[str]) -> None:
    """Keep these locked until this process is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = mmap.mmap(-1, len(folders) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    faults = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    assert faults >= 0, os.strerror(ctypes.get_errno())
    fcntl.ioctl(faults, UFFDIO_API, bytearray(struct.pack("=QQQ", UFFD_API, 0, 0)))
    request = struct.pack("=QQQQ", start, len(pages), MODE_MISSING, 0)
    fcntl.ioctl(faults, UFFDIO_REGISTER, bytearray(request))
    for number, folder in enumerate(folders):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        page = ctypes.c_void_p(start + number * mmap.PAGESIZE)
        # The name is there: once the second call has the lock, it makes nothing.
        known = "status" if folder.startswith("/proc/") else "cgroup.procs"
        name = f"{folder}/{known}".encode()
        for call in ((GETDENTS64, fd, page, mmap.PAGESIZE), (MKDIRAT, AT_FDCWD, name, 0o755)):
            thread = threading.Thread(target=libc.syscall, args=call, daemon=True)
            thread.start()
            _wait_asleep(thread, call[0])
    print("locked", flush=True)
    threading.Event().wait()


def _wait_asleep(thread: threading.Thread, call: int) -> None:
    """Until it waits in the kernel, in this system call."""
    shown = Path(f"/proc/self/task/{thread.native_id}/syscall")
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        with suppress(OSError):
            if shown.read_text().split()[0] == str(call):
                return
        time.sleep(0.002)
    raise TimeoutError(shown.read_text())


if __name__ == "__main__":
    _hold(sys.argv[1:])
