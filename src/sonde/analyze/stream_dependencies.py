# SPDX-License-Identifier: Apache-2.0
"""Which operation of another stream each operation waited for, by events of the device's API.

`cudaStreamWaitEvent(S, e)` lets what is launched into S afterwards wait for all that was launched
before `cudaEventRecord(e, R)` into R. Correlation ids count up with the calls of a process, so the
first operation of S with a larger id waits for the last one of R with a smaller id.
"""

from __future__ import annotations

import numpy as np

from sonde.model.timeline import I64, Timeline


def awaited_by(timeline: Timeline) -> I64:
    """By row of `timeline.device`: the row that it waited for, the one that ended last; -1 none."""
    device, waits = timeline.device, timeline.stream_waits
    found = np.full(len(device), -1, np.int64)
    if not len(waits) or not len(device):
        return found
    order = np.lexsort((device.correlation, device.track))
    track, correlation = device.track[order], device.correlation[order]
    bounds = {int(one): np.searchsorted(track, [one, one + 1]) for one in np.unique(track).tolist()}
    columns = (waits.waiting, waits.awaited, waits.wait, waits.record)
    for waiting, awaited, wait, record in zip(*(c.tolist() for c in columns), strict=True):
        if waiting not in bounds or awaited not in bounds:
            continue
        low, high = bounds[waiting]
        next_one = low + int(np.searchsorted(correlation[low:high], wait, "right"))
        first, last = bounds[awaited]
        before = first + int(np.searchsorted(correlation[first:last], record, "left")) - 1
        if next_one >= high or before < first:
            continue
        row, other = int(order[next_one]), int(order[before])
        if found[row] < 0 or device.end_ns[other] > device.end_ns[found[row]]:
            found[row] = other
    return found
