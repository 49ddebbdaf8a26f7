# SPDX-License-Identifier: Apache-2.0
"""Checks the trace that the injected library wrote in a process, which may have written anything.

Rows that cannot be true are counted and left out. So are runs of calls from before the trace: CUPTI
hands such records over late, with times of the window before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import NotACapture
from sonde.model.device_trace import CALL_KINDS, DEVICE_KINDS, DeviceTrace, Kind, RawTrace

LONGEST_NS: Final = 60_000_000_000
"""Longest trace: more than `sonde trace` takes, whose threads may be delayed."""
_MAX_AFTER_NS: Final = 60_000_000_000
"""Rows may end this long after the trace: a kernel that runs at its end is in it whole."""
_MAX_EARLY_NS: Final = 10_000_000
"""Rows may begin this long before the trace."""
_MAX_RATE: Final = 100.0
"""Of CUPTI's clock, in ticks a ns and in ns a tick."""
_SAME: Final = 0.001
"""Clocks whose rates differ by less both count ns; the difference is their drift."""
_MAX_BYTES: Final = 1 << 50
_MAX_DEVICES: Final = 1 << 16
_NUMPY: Final = {"Q": "u8", "I": "u4", "H": "u2", "B": "u1"}
_LAUNCHES: Final = re.compile(r"cu(da)?(Launch|GraphLaunch)")
_ENOUGH: Final = 20
"""Of this many launches at least one kernel runs during the trace."""
_LOST: Final = {
    "left_out": "records that found no room in the trace's memory",
    "dropped": "records that CUPTI dropped",
    "no_buffer": "times CUPTI found no buffer",
    "held": "buffers that CUPTI did not give back in time",
    "foreign": "buffers of another profiler, left alone",
    "unknown": "records of kinds that were not asked for",
}


def read(
    raw: RawTrace, pid: int, wall_offset_ns: int, tids: Mapping[int, int] | None = None
) -> DeviceTrace:
    """The rows that can be true.

    `tids`: by thread id in the process's pid namespace, the id on this machine. Raises NotACapture
    where the clocks cannot be true.
    """
    head = raw.head
    clock = _Clock(head, pid)
    lost = {text: head[name] for name, text in _LOST.items()}
    rows = np.frombuffer(raw.records, _dtype(raw)).copy()
    for field in ("start_ns", "end_ns"):
        rows[field] = clock.to_host(rows[field])
    true = _possible(rows, head["opened_ns"] - _MAX_EARLY_NS, head["closed_ns"] + _MAX_AFTER_NS)
    lost["records that cannot be true"] = int(np.count_nonzero(~true))
    rows = rows[true]
    is_call = np.isin(rows["kind"], CALL_KINDS)
    launched = _since_begin(rows, is_call)
    lost["runs of calls from before the trace, left out"] = int(np.count_nonzero(~launched))
    rows = rows[launched]
    off_ns = int(clock.to_host(np.array([head["off_cupti_ns"]], np.uint64))[0])
    is_cut = (rows["graph"] > 0) & (rows["end_ns"] > off_ns)
    lost["runs of graphs that the end of the trace cut, left out"] = int(np.count_nonzero(is_cut))
    rows = rows[~is_cut]
    rows["tid"] = _translated(rows["tid"], tids or {})
    return DeviceTrace(
        pid=pid,
        start_ns=head["opened_ns"],
        end_ns=head["closed_ns"],
        wall_offset_ns=wall_offset_ns,
        rows=rows[np.argsort(rows["start_ns"], kind="stable")],
        names=raw.names,
        is_cut=bool(head["cut"]),
        lost={what: min(count, 1 << 53) for what, count in lost.items() if count},
        clock_error_ns=clock.drift_ns,
    )


def problem(trace: DeviceTrace) -> str:
    """What a trace lacks that it should have, in words; '' nothing.

    CUPTI was seen to record no kernel of a process ever again after it had switched them on late.
    """
    calls = trace.of(*CALL_KINDS)
    launching = [n for n, text in trace.names.items() if _LAUNCHES.match(text)]
    launches = int(np.isin(calls["name"], launching).sum())
    if launches >= _ENOUGH and not trace.count(Kind.KERNEL):
        return (
            f"CUPTI recorded {launches:,} launches and no kernel: it does not see kernels in this "
            "process, and other profilers will see none there either until it is restarted"
        )
    return ""


class _Clock:
    """Converts CUPTI's times, by a line through both clocks at the begin and the end of a trace.

    CUPTI's clock counts ns, or, once torch.profiler has given it another one, that one's ticks.
    """

    def __init__(self, head: Mapping[str, int], pid: int) -> None:
        """Raises NotACapture for values that can be no clock's."""
        self._low = head["opened_cupti_ns"]
        self._begin_ns = head["opened_ns"]
        span = head["closed_cupti_ns"] - self._low
        span_ns = head["closed_ns"] - self._begin_ns
        if not (
            0 < span_ns <= LONGEST_NS
            and self._begin_ns < 1 << 62
            and 0 < self._low < head["closed_cupti_ns"] < 1 << 63
            and 1 / _MAX_RATE < span / span_ns < _MAX_RATE
        ):
            raise NotACapture(
                f"the clocks in the trace of process {pid} disagree", "Trace it again."
            )
        self._rate = span_ns / span
        # Not known where the clocks count other units: 0.
        self.drift_ns = abs(span - span_ns) if abs(span / span_ns - 1) < _SAME else 0

    def to_host(self, times: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """CLOCK_MONOTONIC of CUPTI's times; 0 for those far from the trace."""
        since = times.astype(np.int64) - self._low
        since_ns = np.rint(since * self._rate)
        near = np.abs(since_ns) < LONGEST_NS + _MAX_AFTER_NS
        here_ns = np.maximum(self._begin_ns + np.where(near, since_ns, 0).astype(np.int64), 0)
        return np.where(near, here_ns, 0).astype(np.uint64)


def _dtype(raw: RawTrace) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": list(raw.fields),
            "formats": [_NUMPY[code] for _, code in raw.fields.values()],
            "offsets": [offset for offset, _ in raw.fields.values()],
            "itemsize": raw.record_bytes,
        }
    )


def _possible(rows: NDArray[Any], low: int, high: int) -> NDArray[np.bool_]:
    """Which rows can be true: with a time between `low` and `high`, among others."""
    start, end = rows["start_ns"], rows["end_ns"]
    known = np.isin(rows["kind"], [*DEVICE_KINDS, *CALL_KINDS])
    timed = (start >= max(low, 1)) & (start <= end) & (end <= high)
    bounded = (rows["bytes"] <= _MAX_BYTES) & (rows["device"] < _MAX_DEVICES)
    possible: NDArray[np.bool_] = known & timed & bounded
    return possible


def _since_begin(rows: NDArray[np.void], is_call: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows belong to calls since the first one that was recorded.

    Correlation ids count calls of the runtime and of the driver together. Not every call that
    launches is recorded: cuBLAS launches by calls of the driver that CUPTI leaves out here.
    """
    if not is_call.any():
        return is_call
    calls = rows[is_call]
    first = calls["correlation"][np.argmin(calls["start_ns"])]
    since: NDArray[np.uint32] = rows["correlation"] - first  # modulo 2**32, as the ids
    return since < 1 << 31


def _translated(tids: NDArray[np.uint32], known: Mapping[int, int]) -> NDArray[np.uint32]:
    own, inverse = np.unique(tids, return_inverse=True)
    here = np.array([known.get(tid, tid) for tid in own.tolist()], np.uint32)
    return here[inverse] if len(own) else tids
