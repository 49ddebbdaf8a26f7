# SPDX-License-Identifier: Apache-2.0
"""Line numbers of CPython's instructions."""

from __future__ import annotations


def line_at(table: bytes, first_line: int, offset: int, version: tuple[int, int]) -> int:
    """The line of the instruction at `offset` bytes; `first_line` where the table has none."""
    if offset < 0:
        return first_line
    if version < (3, 11):
        return _line_before_3_11(table, first_line, offset)
    return _line(table, first_line, offset)


def _line_before_3_11(table: bytes, first_line: int, offset: int) -> int:
    """Pairs (bytes, line delta); -128: no line (Objects/lnotab_notes.txt of 3.10)."""
    line, end = first_line, 0
    for at in range(0, len(table) - 1, 2):
        end += table[at]
        delta = table[at + 1] - (table[at + 1] >> 7 << 8)
        has_line = delta != -128
        if has_line:
            line += delta
        if offset < end:
            return line
    return line


def _line(table: bytes, first_line: int, offset: int) -> int:
    """Entries of a first byte and the fields that its kind has (Objects/locations.md, 3.11 on)."""
    line, end, at = first_line, 0, 0
    last = first_line
    while at < len(table):
        head = table[at]
        at += 1
        kind = head >> 3 & 15
        end += 2 * ((head & 7) + 1)
        has_line = kind != 15
        if kind == 14:  # a long form: line, end line and both columns as variable-length integers
            delta, at = _signed(table, at)
            line += delta
            for _ in range(3):
                _, at = _unsigned(table, at)
        elif kind == 13:  # no columns
            delta, at = _signed(table, at)
            line += delta
        elif 10 <= kind <= 12:  # one line: the line is 0, 1 or 2 further on
            line += kind - 10
            at += 2
        elif kind < 10:  # the same line, a short form
            at += 1
        if has_line:
            last = line
        if offset < end:
            return last
    return last


_MAX_BITS = 36
"""Of an integer; lines and columns have 32. Higher bits of a damaged table are skipped."""


def _unsigned(table: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(table):
        byte = table[at]
        at += 1
        if shift < _MAX_BITS:
            value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            break
    return value, at


def _signed(table: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(table, at)
    return (-(value >> 1) if value & 1 else value >> 1), at
