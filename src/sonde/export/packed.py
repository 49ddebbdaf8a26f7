# SPDX-License-Identifier: Apache-2.0
"""Documents with columns of numbers, for a page that shows a million of them without parsing.

    0   u32  length of the JSON, without its padding
    4   u32  version, 1
    8   JSON, UTF-8, with spaces up to a multiple of 8; in place of a column
             {"$": [KIND, OFFSET, LENGTH]}: f64, i32 or u8; bytes after the JSON; elements
    …   columns, each at a multiple of 8, little-endian

Text is only ever a string in the JSON, so no name can stand for a column.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from sonde.export import strict_json

MEDIA_TYPE = "application/vnd.sonde.columns"
_VERSION = 1
_HEAD = struct.Struct("<II")
_ALIGNED = 8
_KINDS = {"f": ("f64", "<f8"), "u": ("u8", "u1"), "i": ("i32", "<i4")}


def encode(
    document: dict[str, Any], check: Callable[[bytes], object] = lambda _piece: None
) -> bytes:
    """The document as bytes. Whole numbers beyond 32 bits become floats: exact to 2^53. `check` is
    called with each piece of the JSON, and may raise."""
    parts: list[bytes] = []
    size = 0

    def placed(value: Any) -> Any:
        nonlocal size
        if isinstance(value, dict):
            return {name: placed(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [placed(one) for one in value] if _holds_columns(value) else value
        if not isinstance(value, np.ndarray):
            return value
        kind, dtype = _KINDS[_kind_of(value)]
        content = np.ascontiguousarray(value, dtype=dtype).tobytes()
        at = size
        padding = -len(content) % _ALIGNED
        parts.append(content + b"\0" * padding)
        size += len(content) + padding
        return {"$": [kind, at, len(value)]}

    pieces: list[bytes] = []

    def write(piece: bytes) -> None:
        check(piece)
        pieces.append(piece)

    strict_json.write_compact(write, placed(document))
    text = b"".join(pieces)
    head = _HEAD.pack(len(text), _VERSION)
    return b"".join([head, text, b" " * (-len(text) % _ALIGNED), *parts])


def plain(document: Any) -> Any:
    """The same document with lists in place of arrays, for JSON."""
    if isinstance(document, dict):
        return {name: plain(one) for name, one in document.items()}
    if isinstance(document, list | tuple):
        return [plain(one) for one in document] if _holds_columns(document) else document
    return document.tolist() if isinstance(document, np.ndarray) else document


def _holds_columns(items: Any) -> bool:
    """Whether there may be arrays in a list, by its first item: its items are of one kind."""
    return bool(items) and isinstance(items[0], dict | list | tuple | np.ndarray)


def _kind_of(array: Any) -> str:
    """The key in `_KINDS` of the smallest kind that holds an array's values."""
    if array.dtype.kind in "bu" and array.dtype.itemsize == 1:
        return "u"
    if array.dtype.kind in "iu":
        if array.dtype.itemsize < 4 or not len(array):
            return "i"
        low, high = int(array.min()), int(array.max())
        return "i" if low >= -(1 << 31) and high < 1 << 31 else "f"
    return "f"
