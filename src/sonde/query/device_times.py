# SPDX-License-Identifier: Apache-2.0
"""Start and end of runs on a device, from the time of the launch and the duration.

A stream executes its runs in order: each starts at its launch, or at the end of the run before it
in its stream, whichever is later. Waits of a stream for events of others are not known here: a run
behind one starts later than this computes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.distinct_rows import distinct_rows

Times = npt.NDArray[np.int64]

LAUNCH_TIMED = ("event",)
"""Values of the column `source` (abi/tables.json; event: a pair of CUDA events) whose rows start at
the launch; rows of others start with the run itself."""


def times_on_device(run: pa.Table) -> tuple[Times, Times]:
    """(start, end) on the device of each row of `device_run`, in ns, where all runs were timed."""
    start = run.column("start_time_ns").to_numpy().astype(np.int64)
    end = run.column("end_time_ns").to_numpy().astype(np.int64)
    sources = run.column("source").cast(pa.string())
    rows = np.flatnonzero(pc.is_in(sources, pa.array(LAUNCH_TIMED)).to_numpy(zero_copy_only=False))
    if not len(rows):
        return start, end
    stream = distinct_rows(
        [run.column(name).to_numpy()[rows] for name in ("pid", "device", "stream")]
    )[1]
    order = np.lexsort((start[rows], stream))
    rows, stream = rows[order], stream[order]
    first = np.flatnonzero(np.diff(stream, prepend=-1))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(rows)], strict=True):
        of_stream = rows[low:high]
        length = end[of_stream] - start[of_stream]
        # start[i] = max(launch[i], end[i - 1]) for all i at once: the greatest, up to i, of the
        # launch less the time of the runs before it (`idle`: how long the stream had nothing to
        # run until then, counted from time 0), plus that time.
        busy = np.cumsum(length)
        idle = np.maximum.accumulate(start[of_stream] - (busy - length))
        start[of_stream], end[of_stream] = idle + busy - length, idle + busy
    return start, end
