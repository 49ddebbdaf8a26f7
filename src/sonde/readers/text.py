# SPDX-License-Identifier: Apache-2.0
"""Opens text files, compressed or not, and says clearly what stands in the way."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sonde.errors import CaptureError

_GZIP = b"\x1f\x8b"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed. Raises CaptureError, also for damage met while reading."""
    try:
        if path.is_dir():
            raise CaptureError(f"{path} is a directory", "give a file")
        with path.open("rb") as raw:
            if raw.peek(2)[:2] == _GZIP:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield io.BufferedReader(unpacked)
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
    except OSError as error:
        raise CaptureError(
            f"{path} cannot be read: {error.strerror or error}", "check the path and its disk"
        ) from error


@contextlib.contextmanager
def opened_text(path: Path) -> Iterator[TextIO]:
    """The same as text; bytes that are no UTF-8 are replaced."""
    with opened(path) as raw:
        yield io.TextIOWrapper(raw, "utf-8", "replace")
