# SPDX-License-Identifier: Apache-2.0
"""How far the time of a run, by a pair of events around it, may be from what CUPTI measures of it.

Sampling does not show this error: it is the same in all runs of a kind. The table has what was
measured (docs/design/device_time.md), as bounds.

- A kernel's pair lacks, or has too much of, the time in which the device starts and ends it.
- A pair around a replay of a graph holds the gaps between the graph's kernels, 0.2 to 0.4 us each.
  How many kernels a graph has is not known, so the bound is that of the shortest that were seen.
- Copies and sets have no gate: on an idle device their pairs hold time of the host, at most that of
  the call. Around a copy from or to pageable memory they hold the host's own copying and its page
  faults. A short pair is nearly all of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.model.timeline import F64, CallKind

SOURCE = "docs/design/device_time.md"
"""Where each row of the table is measured, by `TimingError.measured`."""
SHORT_NS = 20_000.0
"""The pair of a copy or a set that is shorter is mostly the host's time, and that of its events."""


@dataclass(frozen=True, slots=True)
class TimingError:
    """Bounds of the truth about the runs of one kind, around the length of each."""

    measured: str
    """The section of `SOURCE` that the bounds are from (Truth, Open), and its figures in short."""
    less_share: float = 0.0
    """The truth may be shorter by this share of the length, ..."""
    short_less_share: float = 0.0
    """... or by this one of the first `SHORT_NS` of it, if that is more, ..."""
    more_share: float = 0.0
    """... or longer by this one."""
    least_ns: float = 0.0
    """No bound is less than this; but a run may be shorter by no more than its length."""
    most_ns: float = np.inf
    """No bound is more than this, except `least_ns`."""
    host_ns: float | None = None
    """Where set, the pair holds time of the host: at most that of the call, and this for the
    events. In place of `most_ns` this bounds by how much a run may be shorter."""


TABLE = {
    CallKind.LAUNCH: TimingError(
        "Truth: 0.65 to 1.19 us for 0.74 to 1.04 us; of 12 to 160 us within 3 % and 1.9 us",
        less_share=0.03,
        more_share=0.03,
        least_ns=370.0,
        most_ns=1_900.0,
    ),
    CallKind.GRAPH_LAUNCH: TimingError(
        "Truth: 112 us for a replay of 100 kernels of 0.93 us; 97.7 % for 99.8 % by a trace "
        "(tests/golden/test_explain_own.py); kernels took 6, 11 and 17 % less than the pair in "
        "three loops, never more",
        less_share=0.17,
        more_share=0.01,
        least_ns=370.0,
    ),
    CallKind.COPY: TimingError(
        "Open: small copies 45 % by pairs and 16 % by the trace; of four bytes 5.8 and 8.0 us for "
        "1.4; copies to pageable memory two to three times as long",
        less_share=0.67,
        short_less_share=0.85,
        least_ns=370.0,
        host_ns=3_000.0,
    ),
    CallKind.SET: TimingError(
        "Open: as small copies, behind a call of 5 us; small sets 9.9 us for 0.8, and 0 for 0.84",
        less_share=0.67,
        short_less_share=0.95,
        least_ns=900.0,
        host_ns=8_000.0,
    ),
}
"""By the call that asks for a run. Measured on an H200 beside torch.profiler."""


def bounds_ns(kind: CallKind, length_ns: F64, call_ns: float = 0.0) -> tuple[F64, F64]:
    """(less, more): how much shorter and longer than `length_ns` each run may have been, in ns.

    One entry for each run. `call_ns`: mean time of the calls that asked for such runs.
    """
    error = TABLE[kind]
    most = error.most_ns if error.host_ns is None else call_ns + error.host_ns
    floor = np.minimum(error.least_ns, length_ns)
    of_short = error.short_less_share * np.minimum(length_ns, SHORT_NS)
    share = np.maximum(error.less_share * length_ns, of_short)
    less = np.maximum(np.minimum(share, most), floor)
    more = np.maximum(np.minimum(error.more_share * length_ns, error.most_ns), error.least_ns)
    return less, more
