# SPDX-License-Identifier: Apache-2.0
"""Start and end of runs on a device, from the time of the launch and the duration.

A stream executes its runs in order: each starts at its launch, or at the end of the run before it
in its stream, whichever is later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Times = npt.NDArray[np.int64]

LAUNCH_TIMED = ("event",)
"""Sources whose rows start at the launch; rows of other sources start with the run itself."""


def times_on_device(run: pa.Table) -> tuple[Times, Times]:
    """(start, end) on the device of each row of `device_run`, in ns, where all runs were timed."""
    start = run.column("start_time_ns").to_numpy().astype(np.int64)
    end = run.column("end_time_ns").to_numpy().astype(np.int64)
    sources = run.column("source").cast(pa.string())
    rows = np.flatnonzero(pc.is_in(sources, pa.array(LAUNCH_TIMED)).to_numpy(zero_copy_only=False))
    if not len(rows):
        return start, end
    streams = [run.column(name).to_numpy() for name in ("pid", "device", "stream")]
    keys = np.stack([column.astype(np.int64) for column in streams], axis=1)[rows]
    stream = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((start[rows], stream))
    rows, stream = rows[order], stream[order]
    first = np.flatnonzero(np.diff(stream, prepend=-1))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(rows)], strict=True):
        mine = rows[low:high]
        length = end[mine] - start[mine]
        # start[i] = max(launch[i], end[i - 1]) for all i at once: the greatest, up to i, of the
        # launch less the time of the runs before it.
        done = np.cumsum(length)
        shift = np.maximum.accumulate(start[mine] - (done - length))
        start[mine], end[mine] = shift + done - length, shift + done
    return start, end
