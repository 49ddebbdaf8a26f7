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

from sonde.errors import SinkError

HEADER = struct.pack("<8sH6x", b"SONDE\r\n\x1a", 1)


class CaptureFile:
    """Appends whole chunks. A chunk that does not fit is taken back, so the file stays whole."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """Make the file; `force`: in place of one that is there. Raises SinkError."""
        self.path = path
        self.written_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_TRUNC if force else os.O_EXCL
        try:
            self._fd = os.open(path, flags, 0o644)
        except FileExistsError as error:
            raise SinkError(f"{path} exists", "choose another name with -o, or --force") from error
        except OSError as error:
            raise SinkError(
                f"cannot write {path}: {error.strerror}", "choose another place with -o"
            ) from error
        try:
            self.write(HEADER)
        except SinkError:
            self.close()
            path.unlink(missing_ok=True)
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
