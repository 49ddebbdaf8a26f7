# SPDX-License-Identifier: Apache-2.0
"""Writes capture files: a header, then chunks. A file cut at any byte stays readable.

```text
SONDE\\r\\n\\x1a | u16 version | 6 zero bytes | chunk | chunk | …
```
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from sonde import private_files
from sonde.errors import SinkError

HEADER = struct.pack("<8sH6x", b"SONDE\r\n\x1a", 1)
"""16 bytes: magic, version 1, padding."""


class CaptureFile:
    """Appends whole chunks. A chunk that does not fit is removed again, so the file stays valid."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """Create the file, mode 0600; `force`: replace an existing one. Raises SinkError.

        A pipe or device is written directly: a partly written chunk cannot be removed from it.
        """
        self.path = path
        self.written_bytes = 0
        opened = private_files.create(path, force)
        self._fd, self.is_stream = opened.fd, opened.is_stream
        self._created = os.fstat(self._fd)
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
        """Append one whole chunk. Raises SinkError where it cannot be written."""
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
                "free some space; the recording up to now is kept" if full else "check the disk",
            ) from error
        self.written_bytes += len(chunk)

    def losses(self) -> Mapping[str, int]:
        """No losses: `write` writes a chunk or raises."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """No metrics."""
        return {}

    def close(self) -> None:
        """Close the file; may be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close the file and remove it, unless its name refers to another file by now."""
        self.close()
        if not self.is_stream:
            private_files.remove(self.path, self._created)
