# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system that never answers: who asks it for a file cannot be killed."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INIT = 26
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def mounted(at: Path) -> Iterator[threading.Event]:
    """Mount one at a folder; the event is set once somebody waits. At the end waiters go on."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"silent", bytes(at), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    waits = threading.Event()

    def serve() -> None:
        while True:
            try:
                request = os.read(fd, 1 << 17)
            except OSError:
                return
            _, opcode, unique = struct.unpack_from("=IIQ", request)
            if opcode == _INIT:
                answer = struct.pack("=IIIIHHIIHH28x", 7, 31, 4096, 0, 4, 4, 4096, 1, 1, 0)
                os.write(fd, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)
            else:
                waits.set()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield waits
    finally:
        _abort(at)
        _libc.umount2(bytes(at), _DETACH)
        server.join(5)
        os.close(fd)


def _abort(at: Path) -> None:
    for line in Path("/proc/self/mountinfo").read_text().split("\n"):
        words = line.split(" ")
        if len(words) > 4 and words[4] == str(at):
            number = words[2].partition(":")[2]
            folder = Path(f"/sys/fs/fuse/connections/{number}")
            if not folder.exists():
                _libc.mount(b"fusectl", b"/sys/fs/fuse/connections", b"fusectl", 0, None)
            (folder / "abort").write_text("1")
