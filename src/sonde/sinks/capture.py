# SPDX-License-Identifier: Apache-2.0
"""The file sink: a header, then chunk after chunk. Killed at any byte, it leaves a readable file.

```text
SONDE\\r\\n\\x1a | u16 version | 6 zero bytes | chunk | chunk | …
```
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

from sonde import private_files
from sonde.errors import SinkError

HEADER = struct.pack("<8sH6x", b"SONDE\r\n\x1a", 1)


class CaptureFile:
    """Appends whole chunks. A chunk that does not fit is taken back, so the file stays whole."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """Make the file, mode 0600; `force`: in place of one that is there. Raises SinkError.

        A pipe or a device is written as it comes: what it took cannot be taken back.
        """
        self.path = path
        self.written_bytes = 0
        opened = private_files.create(path, force)
        self._fd, self.is_stream = opened.fd, opened.is_stream
        self._made = os.fstat(self._fd)
        try:
            self.write(HEADER)
        except SinkError:
            self.discard()
            raise

    @property
    def holds_chunks(self) -> bool:
        """Whether anything but the header was written."""
        return self.written_bytes > len(HEADER)

    def write(self, chunk: bytes) -> None:
        """Append one chunk whole. Raises SinkError where it does not fit."""
        view = memoryview(chunk)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            if not self.is_stream:
                os.ftruncate(self._fd, self.written_bytes)
                os.lseek(self._fd, self.written_bytes, os.SEEK_SET)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise SinkError(
                f"cannot write {self.path}: {error.strerror}",
                "free some space; what was recorded until then is kept"
                if full
                else "check the disk",
            ) from error
        self.written_bytes += len(chunk)

    def close(self) -> None:
        """Close the file; more than once does no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close the file and remove it, unless its name stands for something else by now."""
        self.close()
        if not self.is_stream:
            private_files.remove(self.path, self._made)
