# SPDX-License-Identifier: Apache-2.0
"""The slowest traced requests of a capture, with what each waited for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from sonde.model.distinct_rows import distinct_rows
from sonde.model.timeline import I64
from sonde.model.traced_request import RequestWait, TracedRequest
from sonde.query.columns import Frames, codes_of, int64_column

SLOWEST = 10
"""Requests that are kept."""
WAITS = 3
"""Waits of each that are kept, by reason and place."""
_KINDS = {"cpu": 1, "runqueue": 2, "blocked": 3}


def slowest_requests(
    frames: Frames, tables: Mapping[str, pa.Table]
) -> tuple[list[TracedRequest], int]:
    """(the slowest requests, the slowest first; how many there were in all)."""
    rows = tables["traced"]
    if not rows.num_rows:
        return [], 0
    ids = [rows.column(name).combine_chunks() for name in ("trace_id", "span_id")]
    keys = (*(np.asarray(one.indices, np.int64) for one in ids), int64_column(rows, "pid"))
    different, of_row = distinct_rows(keys)
    ns, kind = int64_column(rows, "weight_ns"), codes_of(rows, "kind", _KINDS)
    sums = [
        np.bincount(of_row, ns * (kind == code), len(different)).astype(np.int64)
        for code in _KINDS.values()
    ]
    whole = sums[0] + sums[1] + sums[2]
    names = tables["process"]
    comm = dict(zip(*(names.column(one).to_pylist() for one in ("pid", "comm")), strict=True))
    texts = [one.dictionary.to_pylist() for one in ids]
    waits = _Waits(frames, rows, ns * (kind == _KINDS["blocked"]))
    found = []
    for number in np.argsort(-whole, kind="stable")[:SLOWEST].tolist():
        trace, span, pid = different[number].tolist()
        found.append(
            TracedRequest(
                trace_id=texts[0][trace],
                span_id=texts[1][span],
                process=f"{comm.get(pid) or 'process'} ({pid})",
                ns=int(whole[number]),
                cpu_ns=int(sums[0][number]),
                runqueue_ns=int(sums[1][number]),
                waits=waits.of(np.flatnonzero(of_row == number)),
            )
        )
    return found, len(different)


class _Waits:
    """What rows of `traced` waited for."""

    def __init__(self, frames: Frames, rows: pa.Table, ns: I64) -> None:
        """`ns`: of each row, 0 for those that are no waits."""
        names = rows.column("name").combine_chunks()
        self._roles = frames.roles
        self._location = frames.roles.location[frames.row_of(rows.column("stack_id"))]
        self._reason = np.asarray(names.indices, np.int64)
        self._reasons = names.dictionary.to_pylist()
        self._ns = ns

    def of(self, rows: I64) -> list[RequestWait]:
        """The longest waits of these rows."""
        sums: dict[tuple[int, int], int] = {}
        columns = (column[rows].tolist() for column in (self._reason, self._location, self._ns))
        for reason, location, ns in zip(*columns, strict=True):
            if ns:
                sums[reason, location] = sums.get((reason, location), 0) + ns
        ranked = sorted(sums.items(), key=lambda item: -item[1])[:WAITS]
        return [
            RequestWait(self._reasons[reason], self._roles.location_of(location), ns)
            for (reason, location), ns in ranked
        ]
