# SPDX-License-Identifier: Apache-2.0
"""Lengths in a chunk's payload become offsets again; what a hostile sender lists is refused."""

from __future__ import annotations

import struct
import time

import pyarrow as pa
import pytest

from sonde.query.lengths import MAX_RUNS, restore


def payload(content: bytes, runs: list[tuple[int, int]], count: int | None = None) -> pa.Buffer:
    pairs = b"".join(struct.pack("<II", *run) for run in runs)
    listed = pairs + struct.pack("<I", len(runs) if count is None else count)
    return pa.py_buffer(bytearray(content + listed))


@pytest.mark.parametrize("at", [0, 3])
def test_lengths_become_offsets(at: int) -> None:
    content = bytes(at) + struct.pack("<5I", 10, 1, 2, 0, 2**32 - 1) + b"text"
    found = payload(content, [(at, 5)])
    restore(found)
    assert found.to_pybytes()[at : at + 24] == struct.pack("<5I", 10, 11, 13, 13, 12) + b"text"


def test_a_payload_without_runs_stays() -> None:
    found = payload(b"content", [])
    restore(found)
    assert found.to_pybytes() == b"content\0\0\0\0"


@pytest.mark.parametrize(
    "wrong",
    [
        pa.py_buffer(bytearray(b"")),
        pa.py_buffer(bytearray(b"abc")),
        payload(bytes(16), [], 1_000_000),
        payload(bytes(16), [], 5),
        payload(bytes(16), [(0, 5)]),
        payload(bytes(16), [(2**32 - 1, 2**32 - 1)]),
        payload(bytes(16), [(0, 2), (4, 2)]),
        payload(bytes(16), [(8, 2), (0, 2)]),
        payload(bytes(16), [(16, 0)] * (MAX_RUNS + 1)),
        pa.py_buffer(bytes(struct.pack("<5I", 1, 1, 0, 2, 1))),
    ],
)
def test_what_is_no_list_is_refused(wrong: pa.Buffer) -> None:
    with pytest.raises(ValueError):
        restore(wrong)


def test_the_most_that_a_list_may_ask_for_takes_no_longer_than_its_payload() -> None:
    count = (32 << 20) // 4 // MAX_RUNS
    found = payload(bytes(32 << 20), [(4 * count * it, count) for it in range(MAX_RUNS)])
    began_s = time.process_time()
    restore(found)
    assert time.process_time() - began_s < 2
