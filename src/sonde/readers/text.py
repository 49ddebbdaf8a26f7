# SPDX-License-Identifier: Apache-2.0
"""Opens files that users name, decompressed, with errors that name cause and remedy."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sonde.errors import CaptureError
from sonde.input_files import open_input
from sonde.limits import Budget

_GZIP = b"\x1f\x8b"


class _Counted(io.RawIOBase):
    """The decompressed bytes of a file, within a memory budget."""

    def __init__(self, unpacked: gzip.GzipFile, budget: Budget) -> None:
        self._unpacked = unpacked
        self._budget = budget

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        """Raises CaptureTooLarge."""
        piece = self._unpacked.read1(len(into))
        self._budget.pass_on(len(piece))
        into[: len(piece)] = piece
        return len(piece)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed. Raises CaptureError, also while the file is read."""
    try:
        with open_input(path) as raw:
            assert isinstance(raw, io.BufferedReader)
            if raw.peek(2)[:2] == _GZIP:
                packed_bytes = max(os.fstat(raw.fileno()).st_size, 1)
                budget = Budget(str(path), packed_bytes)
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield io.BufferedReader(_Counted(unpacked, budget), 1 << 16)
            else:
                yield raw
    except FileNotFoundError:
        raise CaptureError(f"{path} does not exist", "check the path") from None
    except PermissionError:
        raise CaptureError(f"{path} may not be read by this user", "make it readable") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CaptureError(
            f"{path} is damaged: {error}", "copy it again, or record it again"
        ) from error
    except ValueError as error:  # A NUL byte in the path.
        if "\0" not in str(path):
            raise
        raise CaptureError(f"{str(path)!r} is no path: {error}", "check the path") from error
    except OSError as error:
        raise CaptureError(
            f"{path} cannot be read: {error.strerror or error}", "check the path and its disk"
        ) from error


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    """The file as text, decompressed; invalid UTF-8 is replaced. Raises CaptureError."""
    with opened(path) as raw:
        yield io.TextIOWrapper(raw, "utf-8", "replace")
