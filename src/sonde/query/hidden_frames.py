# SPDX-License-Identifier: Apache-2.0
"""Leaves frames out of stacks: the kernel's, the runtime's, or all but Python's.

What counts as which is what the server's page counts (`isHidden` of web/src/flame.ts); a test holds
the two together.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.model.code import HIDDEN, Hide, Stacks
from sonde.query.frame_columns import FrameColumns
from sonde.query.grouping import grouped

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

RUNTIME = re.compile(
    r"^(libc[.-]|libpthread|ld-linux|ld-musl|libpython|python3|\[vdso\]|libstdc\+\+|libgcc_s)"
)
"""Binaries of the runtime. Python's frames are none of them."""


_FRAME_BYTES, _STACK_BYTES = 20, 64
"""Memory that leaving frames out needs meanwhile, for each frame in all stacks and each stack."""


class Shown(NamedTuple):
    """Stacks without the frames that are left out. What is equal then is one stack."""

    stacks: Stacks
    number: I32
    """For each of the stacks before, its number in `stacks`; shape (stacks before,)."""
    apart: Mask
    """For each of `stacks`, the value of `apart` of those that it is made of."""


def with_stand_in(frame: pa.Table) -> pa.Table:
    """The table `frame`, and `HIDDEN` as its last row."""
    row = {**dict.fromkeys(frame.column_names, 0), **HIDDEN._asdict()}
    return pa.concat_tables([frame, pa.Table.from_pylist([row], schema=frame.schema)])


def bytes_needed(stacks: Stacks) -> int:
    """Memory that `without_frames` needs until it returns."""
    return _FRAME_BYTES * len(stacks.frame_indices) + _STACK_BYTES * len(stacks)


def without_frames(stacks: Stacks, frames: FrameColumns, hide: Hide, apart: Mask) -> Shown:
    """Leave frames out. A stack that has none left is the stand-in alone; one that had none before
    stays empty.

    `frames`: those of the stacks, of a table `with_stand_in`; `apart`: of each stack; those in
    which it differs never become one, and it is False for stack 0.
    """
    flat = np.asarray(stacks.frame_indices, np.int32)
    offsets = np.asarray(stacks.offsets, np.int32)
    kept = ~_hidden(frames, hide)[flat]
    before = np.zeros(len(flat) + 1, np.int32)
    np.cumsum(kept, out=before[1:])
    ends = before[offsets]
    emptied = (np.diff(offsets) > 0) & (np.diff(ends) == 0)
    stand_in = len(frames) - 2  # the last is that of unknown frames
    flat = np.insert(flat[kept], ends[:-1][emptied], stand_in)
    ends[1:] += np.cumsum(emptied, dtype=np.int32)
    return _distinct(stacks, ends, flat, apart)


def _hidden(frames: FrameColumns, hide: Hide) -> Mask:
    """Which frames are left out; shape (frames,)."""
    is_python = frames.having("kind", lambda kind: kind == "python")
    if hide == Hide.NATIVE:
        return ~is_python
    is_kernel = frames.having("kind", lambda kind: kind == "kernel")
    if hide == Hide.KERNEL:
        return is_kernel
    is_runtime = frames.having("binary", lambda name: RUNTIME.match(name) is not None)
    return is_kernel | (is_runtime & ~is_python)


def _distinct(stacks: Stacks, ends: I32, flat: I32, apart: Mask) -> Shown:
    """Each different stack once, in the order of their first ones. `ends`: where each stack begins
    in `flat`, and the end of the last."""
    buffers = [None, pa.py_buffer(4 * ends.astype(np.int64)), pa.py_buffer(flat)]
    encoded = pa.Array.from_buffers(pa.large_binary(), len(apart), buffers).dictionary_encode()
    keys, number = grouped(encoded.indices.to_numpy().astype(np.int64) << 1 | apart)
    found = encoded.dictionary.take(pa.array(keys >> 1))
    _, where, content = found.buffers()
    offsets = (np.frombuffer(where, np.int64)[: len(keys) + 1] >> 2).astype(np.int32)
    frames = np.frombuffer(content, np.int32) if content else np.zeros(0, np.int32)
    shown = Stacks(stacks.frames, offsets.data, frames[: offsets[-1]].data)
    return Shown(shown, number.astype(np.int32), (keys & 1).astype(bool))
