# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system with one file, `data`, passed through from FILE; `delay S` makes reads slow.

python bench/faults/slow_files.py FILE MOUNT_POINT

Speaks the kernel's protocol (include/uapi/linux/fuse.h, version 7.31) itself: the machine needs no
library for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
import time

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 18, 25, 26
BATCH_FORGET, INTERRUPT = 42, 36
DIRECT_IO = 1
HEADER = struct.Struct("=IIQQIIII")
SETTING = {"delay": 0.0}


def main() -> None:
    """Serve until the mount goes away."""
    path, point = sys.argv[1:]
    data = os.open(path, os.O_RDONLY)
    size = os.fstat(data).st_size
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"slow", point.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    threading.Thread(target=_obey, daemon=True).start()
    while True:
        try:
            request = os.read(fd, 1 << 18)
        except OSError:
            return
        _, opcode, unique, node, *_ = HEADER.unpack_from(request)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        answer = _answer(opcode, node, request[HEADER.size :], data, size)
        error = -errno.ENOSYS if answer is None else 0
        if opcode == LOOKUP and answer is None:
            error = -errno.ENOENT
        body = answer or b""
        os.write(fd, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


def _answer(opcode: int, node: int, body: bytes, data: int, size: int) -> bytes | None:
    if opcode == INIT:
        return struct.pack("=IIIIHHIIHH28x", 7, 31, 4096, 0, 4, 4, 4096, 1, 1, 0)
    if opcode == LOOKUP:
        found = body.rstrip(b"\0") == b"data"
        return struct.pack("=QQQQII", 2, 0, 60, 60, 0, 0) + _attributes(2, size) if found else None
    if opcode == GETATTR:
        return struct.pack("=QII", 60, 0, 0) + _attributes(node, size)
    if opcode == OPEN:
        return struct.pack("=QII", 1, DIRECT_IO, 0)
    if opcode == READ:
        _, offset, length = struct.unpack_from("=QQI", body)
        time.sleep(SETTING["delay"])
        return os.pread(data, length, offset)
    return b"" if opcode in (RELEASE, FLUSH) else None


def _attributes(node: int, size: int) -> bytes:
    mode = 0o040755 if node == 1 else 0o100644
    return struct.pack("=6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0,
                       4096, 0)  # fmt: skip


def _obey() -> None:
    for line in sys.stdin:
        name, _, value = line.partition(" ")
        SETTING[name] = float(value)


if __name__ == "__main__":
    main()
