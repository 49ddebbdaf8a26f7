# SPDX-License-Identifier: Apache-2.0
"""Formats numbers and columns of text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sonde.model import durations

if TYPE_CHECKING:
    from sonde.model.answers import Loss

duration, three_digits = durations.duration, durations.three_digits

_NUMBER: Final = re.compile(r" \([0-9]{1,10}\)(?: \+[0-9,]{1,13})?$")
"""Of a process or a thread, behind its name; and how many others are like it."""
_LEAST_OF_NAME: Final = 5
"""Cells of a name before its number, the mark of what was cut included."""
_DEEPER: Final = 4
"""Cells by which the further lines of a wrapped one begin deeper."""


def size(count_bytes: float) -> str:
    """Bytes in powers of 1000: '4.00 GB'."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count_bytes >= limit * 0.9995:
            return f"{three_digits(count_bytes / limit)} {unit}"
    return f"{count_bytes:.0f} B" if count_bytes else "0"


def rate(count_bytes: float, ns: float) -> str:
    """Bytes per second: '12.3 GB/s', '' for none."""
    return f"{size(count_bytes * 1e9 / ns)}/s" if count_bytes and ns else ""


def percent(part: float, whole: float) -> str:
    """A share: '12.3 %', '-' of a total of 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def loss_line(loss: Loss) -> str:
    """One loss as a line for people."""
    amount = f"{loss.amount:,.0f}"
    return one_line(f"{amount} × {loss.name}: {loss.text}".removesuffix(": "))


def one_line(text: str) -> str:
    """Text without control characters: names come from other programs and may be hostile."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def width_of(text: str) -> int:
    """Width of a printable text in terminal cells."""
    if text.isascii():
        return len(text)
    import unicodedata  # half a megabyte, not needed for ASCII

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def fit(text: str, width: int) -> str:
    """Text of exactly `width` cells: padded, or shortened in its middle. The number of a process or
    a thread at the end ('worker (4711)', 'worker (4711) +7') stays whole where it fits."""
    text = one_line(text)
    if width_of(text) > width:
        number = _NUMBER.search(text)
        if number and (room := width - len(number[0])) >= _LEAST_OF_NAME:
            text = _beginning(text[: number.start()], room - 1).rstrip(" (") + "…" + number[0]
        elif not text.isascii():
            text = _beginning(text, width - 1) + "…"
        else:
            tail = (width - 1) // 3
            text = text[: width - 1 - tail] + "…" + text[len(text) - tail :]
    return text + " " * (width - width_of(text))


def wrapped(text: str, width: int) -> str:
    """Text whose lines take at most `width` cells, as far as they have spaces: what is beyond goes
    to further lines, four cells deeper than the first."""
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + _DEEPER)
    if len(indent) >= width // 2:
        return [line]
    parts = []
    while width_of(line) > width:
        end = len(_beginning(line, width + 1))
        start = len(line) - len(line.lstrip())
        at = line.rfind(" ", start, end)
        if at < 0:  # a word that is wider
            at = line.find(" ", end)
            if at < 0:
                break
        parts.append(line[:at].rstrip())
        line = indent + line[at:].strip()
    return [*parts, line]


def fit_name(text: str, width: int) -> str:
    """A name with dots ('Corpus.Reader.clean') in at most `width` cells: its last part stays whole,
    where it fits; what is before that is cut."""
    text = one_line(text)
    before, dot, last = text.rpartition(".")
    room = width - 1 - width_of(last)
    if width_of(text) <= width or not dot or room < 0 or not text.isascii():
        return fit(text, width).rstrip()
    return f"{before[:room]}…{last}"


def fit_location(text: str, width: int) -> str:
    """A location ('step train.py:12') in at most `width` cells: its function is shortened first."""
    function, space, place = one_line(text).rpartition(" ")
    left = width - width_of(place) - 1
    if width_of(function) <= left or left < 4:
        return fit(text, width).rstrip()
    return f"{fit_name(function, left)}{space}{place}"


def grown(
    rows: Sequence[Sequence[str]], widths: Sequence[int], limit: int, gap: int = 2
) -> list[int]:
    """The widths, made larger for cells that need more as far as a line has room: `limit` cells.
    Columns that need less give it. Widths as those of `columns`."""
    needed = [
        max(map(width_of, map(one_line, column)), default=0) for column in zip(*rows, strict=True)
    ]
    sizes = [abs(width) for width in widths]
    short = [number for number, size in enumerate(sizes) if needed[number] > size]
    spare = limit - sum(sizes) - gap * (len(sizes) - 1)
    for number, size in enumerate(sizes if short else ()):
        if needed[number] < size:
            spare += size - needed[number]
            sizes[number] = needed[number]
    while spare > 0 and short:
        for number in short:
            sizes[number] += spare > 0
            spare -= spare > 0
        short = [number for number in short if needed[number] > sizes[number]]
    if not short and spare > 0:  # what nobody needed stays where it was, from the first column on
        for number, width in enumerate(widths):
            back = min(spare, max(0, abs(width) - sizes[number]))
            sizes[number] += back
            spare -= back
    return [-size if width < 0 else size for size, width in zip(sizes, widths, strict=True)]


def _beginning(text: str, width: int) -> str:
    """As much of a text as fits into `width` cells."""
    taken = 0
    for number, char in enumerate(text[: 4 * width]):  # combining marks have no width
        taken += width_of(char)
        if taken > width:
            return text[:number]
    return text[: 4 * width]


def columns(rows: Sequence[Sequence[str]], widths: Sequence[int], gap: int = 2) -> list[str]:
    """Lines of text columns; a negative width aligns to the right, 0 leaves the text as it is."""
    lines = []
    for row in rows:
        cells = []
        for text, width in zip(row, widths, strict=True):
            if width < 0:
                plain = one_line(text)
                cells.append(" " * (-width - width_of(plain)) + plain)
            else:
                cells.append(fit(text, width) if width else one_line(text))
        lines.append((" " * gap).join(cells).rstrip())
    return lines
