# SPDX-License-Identifier: Apache-2.0
"""Names of the kernel as text: any bytes, printable, no two alike."""

from __future__ import annotations

import os
import random

import pytest

from sonde import procfs
from sonde.procfs.cgroup_paths import place_of
from sonde.sinks.chunk import ChunkBuilder


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        ("täglich ✓".encode(), "täglich ✓"),
        (b"job\xff", r"job\xff"),
        (b"a\nb\x1b[2J\x7f", r"a\x0ab\x1b[2J\x7f"),
        ("\u202e".encode(), r"\xe2\x80\xae"),
        (b"\xed\xa0\x80", r"\xed\xa0\x80"),
        (rb"job\xff", r"job\x5cxff"),
        (rb"job\x5cxff", r"job\x5cx5cxff"),
        (rb"systemd\x2dcryptsetup@a\n.service", r"systemd\x2dcryptsetup@a\n.service"),
    ],
)
def test_a_name_is_shown(raw: bytes, shown: str) -> None:
    assert procfs.text(raw) == shown
    assert procfs.printable(os.fsdecode(raw)) == shown


def test_every_name_is_printable_and_none_like_another() -> None:
    chance = random.Random(4)
    pieces = [b"\\", b"x", b"5c", b"ff", b"0a", b"\xff", b"\xc3", b"\xa4", b"\n", b"\xe2\x80\xae"]
    names = {b"".join(chance.choices(pieces, k=chance.randrange(9))) for _ in range(20_000)}
    names |= {chance.randbytes(chance.randrange(9)) for _ in range(20_000)}
    for raw in names:
        shown = procfs.text(raw)
        assert shown.isprintable()
        shown.encode()
        assert procfs.raw_name(shown) == raw
        assert procfs.printable(os.fsdecode(raw)) == shown


def test_text_that_is_no_name_of_a_file_is_shown_too() -> None:
    assert procfs.printable("a\ud800\udcff") == r"a\xed\xa0\x80\xed\xb3\xbf"


def test_a_unit_that_systemd_escaped_is_read_through_both_escapes() -> None:
    path = procfs.text(rb"/system.slice/t\xc3\xa4glich\x2d1\x0a.service")
    assert place_of(path).unit == r"täglich-1\x0a.service"


def test_text_that_is_no_name_costs_a_chunk_nothing_else() -> None:
    chunk = ChunkBuilder(0)
    chunk.add("event", [(1, "notice", "a", 0, 0, 1.0, "x\udcff")])
    assert chunk.encode({})
