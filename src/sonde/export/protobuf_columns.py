# SPDX-License-Identifier: Apache-2.0
"""Many messages of a protocol buffer at once: a column of bytes for each field.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

I64 = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]

_BITS = 7
"""Of a number in each byte of a varint, the lowest first."""


def tag(field: int, *, sized: bool = False) -> bytes:
    """What comes before the value of a field below 16: a number, or `sized`: bytes."""
    return bytes([field << 3 | (2 if sized else 0)])


def varint(number: int) -> bytes:
    """A whole number; a negative one as if it had 64 bits."""
    packed = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= _BITS
    packed.append(number)
    return bytes(packed)


def varints(numbers: Numbers) -> pa.Array:
    """As `varint` of each number; shape (numbers,)."""
    return _packed(numbers, b"", np.ones(len(numbers), bool))


def number_fields(field: int, numbers: Numbers) -> pa.Array:
    """A field of each message; nothing where the number is 0."""
    return _packed(numbers, tag(field), numbers != 0)


def messages(field: int, *parts: pa.Array | bytes) -> pa.Array:
    """A field that is a message: the parts of each, joined, behind their length."""
    return _with_length(field, joined(*parts))


def messages_of(field: int, data: bytes, ends: I64) -> pa.Array:
    """A field whose values lie one after another; `ends`: the end of each in `data`."""
    return _with_length(field, _array(data, ends))


def _with_length(field: int, body: pa.Array) -> pa.Array:
    return joined(tag(field, sized=True), varints(lengths(body)), body)


def joined(*parts: pa.Array | bytes) -> pa.Array:
    """The parts of each row one after another. One of them is an array."""
    columns = [part if isinstance(part, pa.Array) else pa.scalar(part) for part in parts]
    return pc.binary_join_element_wise(*columns, pa.scalar(b""))


def lengths(texts: pa.Array) -> I64:
    """The number of bytes of each."""
    found: I64 = pc.binary_length(texts).to_numpy().astype(np.int64)
    return found


def varint_lengths(numbers: I64) -> I64:
    """The number of bytes of each as a varint."""
    found, rest = np.ones(len(numbers), np.int64), numbers.astype(np.uint64) >> np.uint64(_BITS)
    while rest.any():
        found += rest > 0
        rest >>= np.uint64(_BITS)
    return found


def content(texts: pa.Array) -> bytes:
    """All rows one after another."""
    if not len(texts):
        return b""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)
    begin, end = int(ends[texts.offset]), int(ends[texts.offset + len(texts)])
    return bytes(data.slice(begin, end - begin)) if end > begin else b""


def _array(data: bytes, ends: I64) -> pa.Array:
    """Rows that lie one after another; `ends`: the end of each."""
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(ends), buffers)


def _packed(numbers: Numbers, before: bytes, wanted: npt.NDArray[np.bool_]) -> pa.Array:
    values = numbers.astype(np.uint64)
    width = max(1, -(-int(values.max(initial=0)).bit_length() // _BITS))
    kind: Any = np.uint32 if width < 5 else np.uint64
    shifts: Numbers = np.arange(0, _BITS * width, _BITS, dtype=kind)
    shifted: Numbers = values.astype(kind)[:, np.newaxis] >> shifts
    first = len(before)
    packed = np.empty((len(values), first + width), np.uint8)
    packed[:, :first] = np.frombuffer(before, np.uint8)
    packed[:, first:] = shifted & kind(0x7F)
    used = np.ones_like(packed, bool)
    used[:, first + 1 :] = shifted[:, 1:] > 0
    packed[:, first:-1] |= used[:, first + 1 :].view(np.uint8) << 7
    used &= wanted[:, np.newaxis]
    return _array(packed[used].tobytes(), np.cumsum(used.sum(axis=1)))
