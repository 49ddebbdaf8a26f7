# SPDX-License-Identifier: Apache-2.0
"""Offsets of texts and lists in a chunk's payload, where lengths stand in their place.

```
u32 position  u32 count     for each run of offsets: its first byte in the payload, how many
u32 runs                    how many pairs stand before it, at the payload's end
```

Each number of a run but the first is stored less the one before, modulo 2^32; why, is in
native/rows/src/lengths.rs, which writes it. All little endian.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

MAX_RUNS = 1_024
"""Sonde writes about 50."""


def restore(payload: pa.Buffer) -> None:
    """Make offsets of the lengths again, in place; the list stays. `payload`: decompressed,
    mutable.
    Raises ValueError where it has no such list."""
    size = payload.size
    runs = int(np.frombuffer(payload, "<u4", 1, size - 4)[0]) if size >= 4 else MAX_RUNS + 1
    begin = size - 4 - 8 * runs
    if runs > MAX_RUNS or begin < 0:
        raise ValueError("no list of lengths")
    pairs = np.frombuffer(payload, "<u4", 2 * runs, begin).reshape(-1, 2).tolist()
    past = 0
    for position, count in pairs:
        # Each byte belongs to one run at most: the work is bounded by the payload's size.
        if position < past or position + 4 * count > begin:
            raise ValueError("lengths outside their payload")
        past = position + 4 * count
        numbers = np.frombuffer(payload, "<u4", count, position)
        np.cumsum(numbers, dtype=np.uint32, out=numbers)
