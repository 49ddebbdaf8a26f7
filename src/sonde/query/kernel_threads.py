# SPDX-License-Identifier: Apache-2.0
"""Names of kernel threads that ended waits: a recording of chosen processes has no rows of them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sonde.query.columns import int64_column

EVENT: Final = "kernel_thread"
"""Name of the rows of `event`."""
MOST: Final = 4_096
"""Of them, that are read."""
_MAX_COMM: Final = 64


def kernel_threads(event: pa.Table) -> dict[int, str]:
    """By thread id: 'kernel: ksoftirqd/0'. Of two names the last one counts: an id may come again,
    and a kworker is called by what it works on."""
    rows = event.filter(pc.equal(event.column("name").cast(pa.string()), EVENT)).slice(0, MOST)
    names = rows.column("text").cast(pa.string()).to_pylist()
    found = zip(int64_column(rows, "pid").tolist(), names, strict=True)
    return {pid: f"kernel: {name[:_MAX_COMM]}" for pid, name in found if name}
