# SPDX-License-Identifier: Apache-2.0
"""Functions of a store by time: code that calls itself, code without a name, the recorder's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sonde.query import stored
from sonde.query.selection import Selection
from sonde.query.stored_session import StoredSession

FRAMES = {
    1: ("work", "app", 3),
    2: ("work", "app", 7),  # the same function at another line
    3: ("", "libc.so.6", 0),
    4: ("", "libc.so.6", 0),
    5: ("schedule", "[kernel]", 0),
    6: ("bpf_prog_12ab_on_switch", "[kernel]", 0),
    7: ("__traceiter_sched_switch", "[kernel]", 0),
}
STACKS = {
    10: [1, 2, 1, 3, 4],  # work, which calls itself, beneath code without a name
    11: [6, 7, 5, 2, 3],  # a wait, with the program that recorded it
    12: [6, 7],
    13: [],
}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[StoredSession]:
    keys = list(FRAMES)
    names, binaries, lines = zip(*FRAMES.values(), strict=True)
    tables: dict[str, dict[str, Any]] = {
        "frame": {
            "node": ["n"] * len(keys), "key": keys, "kind": ["native"] * len(keys),
            "function": names, "binary": binaries, "file": [""] * len(keys), "line": lines,
        },
        "stack": {"node": ["n"] * 4, "key": list(STACKS), "frame_keys": list(STACKS.values())},
        "sample": {
            "node": ["n"] * 5, "kind": ["cpu", "cpu", "blocked", "blocked", "blocked"],
            "pid": [1] * 5, "start_ns": [1] * 5, "tid": [1] * 5, "name": [""] * 5,
            "time_ns": [5] * 5, "stack": [10, 11, 11, 12, 13],
            "weight_count": [1.0] * 5, "weight_ns": [100, 7, 40, 3, 1], "weight_bytes": [0] * 5,
        },
    }  # fmt: skip
    paths = {}
    for name, columns in tables.items():
        paths[name] = [tmp_path / f"{name}.parquet"]
        table = pa.table(columns)
        if name == "sample":
            table = table.append_column("rows", pa.array([1] * 5))
            paths["sample_summed"] = paths[name]
        pq.write_table(table, paths[name][0])  # type: ignore[no-untyped-call]
    found = StoredSession(tmp_path, paths)
    yield found
    found.close()


def top(session: StoredSession, kind: str) -> dict[str, tuple[float, float]]:
    """(own, total) by function."""
    rows = stored.top_functions(session, Selection(0, 10, kind)).to_pylist()
    return {row["function"]: (row["own_ns"], row["total_ns"]) for row in rows}


def test_a_function_that_calls_itself_counts_once(session: StoredSession) -> None:
    found = top(session, "cpu")
    assert found["work"] == (100, 107)
    assert found["[libc.so.6]"] == (0, 107)
    assert found["bpf_prog_12ab_on_switch"] == (7, 7)  # on a CPU that is time that was spent


def test_what_records_a_wait_is_no_part_of_it(session: StoredSession) -> None:
    assert top(session, "blocked") == {
        "schedule": (40, 40),
        "work": (0, 40),
        "[libc.so.6]": (0, 40),
    }
