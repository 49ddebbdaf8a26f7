# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser accepts: NaN and infinite numbers become null.

Documents are written in pieces: escaped text is up to six times longer, so a whole document would
need many times the memory of the capture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sonde.export.json_columns import Rows

_AT_ONCE = 256
"""Items of a list that are encoded together."""
_NUMBERS_AT_ONCE = 1 << 14
_PIECE_CHARS = 1 << 18
"""Characters that are written at once, about."""

Write = Callable[[bytes], object]


class Fragments:
    """A list whose items are JSON already: texts of one item, or of some with commas between."""

    def __init__(self, items: Iterable[str]) -> None:
        self.items = items


class Encoded:
    """A value that is JSON already."""

    def __init__(self, text: str) -> None:
        self.text = text


class Lazy:
    """A list of rows, which are read when they are written."""

    def __init__(self, read: Callable[[], Rows]) -> None:
        self.read = read


def dumps(document: Any, **options: Any) -> str:
    """As `json.dumps`, but strict JSON (RFC 8259): NaN and infinite numbers are null."""
    try:
        return _encoder(**options).encode(document)
    except ValueError:  # rare, so the document is only searched now
        return _encoder(**options).encode(_finite(document))


@cache
def _encoder(**options: Any) -> json.JSONEncoder:
    """One encoder for each set of options: to make one costs as much as to encode a small
    document."""
    return json.JSONEncoder(allow_nan=False, **options)


def write_compact(write: Write, document: Any) -> None:
    """Write a document without whitespace.

    A list is encoded some items at a time, what a tuple, an iterator or `Fragments` holds item by
    item. Arrays are of whole numbers.
    """
    _write(write, _compact(document))


def write_rows(write: Write, rows: Iterable[list[Any]]) -> None:
    """Write the rows of all lists as one list, without whitespace; each list is encoded at once."""

    def texts() -> Iterator[str]:
        comma = "["
        for some in rows:
            if some:
                yield comma + _quickly(some)[1:-1]
                comma = ","
        yield "]" if comma == "," else "[]"

    _write(write, texts())


def _quickly(rows: list[Any]) -> str:
    try:
        return msgspec.json.encode(rows).decode()  # NaN and infinite numbers are null
    except (TypeError, ValueError, OverflowError):  # numbers or texts that it does not write
        return dumps(rows, separators=(",", ":"))


def write_indented(write: Write, document: dict[str, Any]) -> None:
    """Write a document in the format of `json.dumps(…, indent=1)`; lists in it may be iterators or
    `Lazy`."""
    _write(write, _indented(document, "\n"))


def _write(write: Write, texts: Iterable[str]) -> None:
    """Write texts in pieces of about `_PIECE_CHARS`."""
    pieces: list[str] = []
    size = 0
    for text in texts:
        pieces.append(text)
        size += len(text)
        if size >= _PIECE_CHARS:
            write("".join(pieces).encode())
            pieces.clear()
            size = 0
    write("".join(pieces).encode())


def _compact(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        comma = "{"
        for key, one in value.items():
            yield f"{comma}{encode_basestring_ascii(key)}:"
            yield from _compact(one)
            comma = ","
        yield "}" if value else "{}"
    elif isinstance(value, list):
        yield "["
        for at in range(0, len(value), _AT_ONCE):
            text = dumps(value[at : at + _AT_ONCE], separators=(",", ":"))
            yield f",{text[1:-1]}" if at else text[1:-1]
        yield "]"
    elif hasattr(value, "dtype"):
        from sonde.export import json_columns  # and with it pyarrow, which a recorder lacks

        yield "["
        for at in range(0, len(value), _NUMBERS_AT_ONCE):
            text = json_columns.numbers(value[at : at + _NUMBERS_AT_ONCE])
            yield f",{text}" if at else text
        yield "]"
    elif isinstance(value, tuple | Iterator):
        comma = ""
        yield "["
        for item in value:
            yield comma
            yield from _compact(item)
            comma = ","
        yield "]"
    elif isinstance(value, Encoded):
        yield value.text
    elif isinstance(value, Fragments):
        comma = "["
        for some in value.items:
            yield comma + some
            comma = ","
        yield "]" if comma == "," else "[]"
    else:
        yield dumps(value)


def _indented(value: Any, line: str) -> Iterator[str]:
    """`line`: the line break and indentation before the value."""
    if isinstance(value, dict):
        comma, inner = "{", f"{line} "
        for key, one in value.items():
            yield f"{comma}{inner}{encode_basestring_ascii(key)}: "
            yield from _indented(one, inner)
            comma = ","
        yield f"{line}}}" if value else "{}"
    elif isinstance(value, Lazy):
        from sonde.export import json_columns

        comma = "["
        for text in json_columns.items(value.read(), f"{line} ", _item):
            yield comma + text[1:] if comma else text
            comma = ""
        yield "[]" if comma else f"{line}]"
    elif isinstance(value, list | tuple | Iterator):
        comma, inner = "[", f"{line} "
        for one in value:
            yield comma + inner + _item(one, inner)
            comma = ","
        yield "[]" if comma == "[" else f"{line}]"
    else:
        yield dumps(value)


def _item(value: Any, line: str) -> str:
    """An item of a list as `_indented` writes it, in one piece."""
    if type(value) is not dict:
        return _plain(value) or "".join(_indented(value, line))
    inner = f"{line} "
    rows = [
        f"{encode_basestring_ascii(key)}: {_plain(one) or _item(one, inner)}"
        for key, one in value.items()
    ]
    return f"{{{inner}{f',{inner}'.join(rows)}{line}}}" if rows else "{}"


def _plain(value: Any) -> str | None:
    """A text or a number; None for what may be something else. Most values are one of these."""
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)
    return int.__repr__(value) if kind is int else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
