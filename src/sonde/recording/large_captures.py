# SPDX-License-Identifier: Apache-2.0
"""Captures read for a verdict, large ones without what few verdicts need."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.query.capture import Capture

_LARGE_BYTES = 8 << 20
"""A file of at least this size is read without single intervals at first."""
_SPANS = ("span",)
"""The table of single intervals: a third of a capture."""


def read_for_verdict(path: Path, read: Callable[[Path, Collection[str]], Capture]) -> Capture:
    """A capture, without the single intervals of a large one where the verdict needs none: they
    show what held up a device. `read`: reads a file without some tables. Raises CaptureError."""
    from sonde.query.schema import TABLES

    if not _is_large(path):
        return read(path, ())
    capture = read(path, _SPANS)
    kinds = capture.tables["activity"].column("kind").combine_chunks().dictionary.to_pylist()
    if not capture.tables["device_run"].num_rows and "device" not in kinds:
        return capture
    again = read(path, [name for name in TABLES if name not in _SPANS]).tables
    spans = {name: again[name] for name in _SPANS}
    return replace(capture, tables=capture.tables | spans)


def _is_large(path: Path) -> bool:
    """Whether a file can be read twice, and that takes less than reading all of it once."""
    from sonde.input_files import own_descriptor

    with suppress(OSError):
        return own_descriptor(path) is None and path.stat().st_size >= _LARGE_BYTES
    return False
