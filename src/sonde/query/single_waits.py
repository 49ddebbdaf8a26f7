# SPDX-License-Identifier: Apache-2.0
"""The waits that a capture has one by one: those of some length (`wait_span_ms`), which are rows of
`span`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.wait_lengths import WaitLengths, lengths_of
from sonde.query.columns import int64_column
from sonde.query.known_threads import coded_texts

Ints = npt.NDArray[np.int64]

_KINDS = pa.array(["blocked", "runqueue"])


class WaitKey(NamedTuple):
    """What waits have in common that are one row of `WaitRows`."""

    thread: int
    """Index in `Session.threads`."""
    kind: str
    """Of `activity`: blocked, runqueue."""
    reason: str


def single_waits(span: pa.Table) -> pa.Table:
    """Rows of `span` that are waits, with the columns that queries have of other tables: pid,
    start_ns, tid, kind, name, time_ns (when it began) and ns."""
    rows = span.filter(pc.is_in(span.column("kind").cast(pa.string()), _KINDS))
    start, end = int64_column(rows, "start_time_ns"), int64_column(rows, "end_time_ns")
    return (
        rows.select(["pid", "start_ns", "tid", "kind", "name"])
        .append_column("time_ns", rows.column("start_time_ns"))
        .append_column("ns", pa.array(np.maximum(end - start, 0)))
    )


class SingleWaits:
    """The lengths of single waits, by thread, kind and reason."""

    def __init__(self, rows: pa.Table) -> None:
        """`rows`: thread, kind, name and ns of each."""
        kinds, kind = coded_texts(rows.column("kind"))
        names, name = coded_texts(rows.column("name"))
        thread, ns = int64_column(rows, "thread"), int64_column(rows, "ns")
        order = np.lexsort((name, kind, thread))
        keys = np.column_stack((thread, kind, name))[order]
        self._ns: Ints = ns[order]
        first = np.flatnonzero(np.diff(keys, axis=0, prepend=-1).any(axis=1))
        ends = [*first[1:].tolist(), len(keys)][: len(first)]
        self._part = {
            WaitKey(number, kinds[of_kind], names[of_name]): slice(begin, end)
            for (number, of_kind, of_name), begin, end in zip(
                keys[first].tolist(), first.tolist(), ends, strict=True
            )
        }

    def lengths(self, keys: Iterable[WaitKey]) -> WaitLengths:
        """The distribution of all waits with these keys together."""
        parts = [self._ns[self._part[key]] for key in keys if key in self._part]
        return lengths_of(np.concatenate(parts).tolist() if parts else ())
