# SPDX-License-Identifier: Apache-2.0
"""Line tables as a hostile process may have them in its memory."""

from __future__ import annotations

import time

from sonde.unwind.python_code import MAX_LINES_BYTES
from sonde.unwind.python_lines import line_at


def test_an_integer_that_never_ends_takes_no_longer_than_the_table() -> None:
    table = b"\xf7" + b"\x7f" * (MAX_LINES_BYTES - 1)
    began = time.process_time()

    line_at(table, 1, 1 << 40, (3, 12))

    assert time.process_time() - began < 0.5


def test_lines_and_columns_of_32_bits_are_read_whole() -> None:
    table = bytes((0x80 | 13 << 3, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x03))

    assert line_at(table, 1, 0, (3, 12)) == (1 << 31)
