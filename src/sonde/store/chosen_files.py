# SPDX-License-Identifier: Apache-2.0
"""Which files a question reads: those of a tenant with rows of the selected time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sonde.query.schema import TABLES
from sonde.query.selection import SUMS_VIEW
from sonde.store.catalog import StoredFile
from sonde.store.tables import DICTIONARIES, SUMMED_TABLE

FilesOf = Callable[[str, str, int, int], list[StoredFile]]
"""Files of (tenant, table, start_ns, end_ns), as `Catalog.files`."""
_EVER = 0, (1 << 63) - 1


def chosen_files(
    files_of: FilesOf, tenant: str, start_ns: int, end_ns: int
) -> dict[str, list[StoredFile]]:
    """By table, the files with a time in [start_ns, end_ns), and the dictionaries of their days
    (stack, frame, process, thread: rows that others refer to, stored once a day).

    `SUMS_VIEW` has the files of `sample`; in place of one that lies in the time as a whole, the
    file of `SUMMED_TABLE` with its sums, which has the same file name. The table `chunk`, which
    only a store has, has a row for each stored chunk.
    """
    found: dict[str, list[StoredFile]] = {}
    days = set()
    for name in (*TABLES, "chunk"):
        if name not in DICTIONARIES:
            found[name] = files_of(tenant, name, start_ns, end_ns)
            days |= {one.day for one in found[name]}
    sums = {Path(one.path).name: one for one in files_of(tenant, SUMMED_TABLE, start_ns, end_ns)}
    found[SUMS_VIEW] = [
        sums.get(Path(one.path).name, one)
        if start_ns <= one.min_ns and one.max_ns < end_ns
        else one
        for one in found["sample"]
    ]
    for name in DICTIONARIES:
        found[name] = [one for one in files_of(tenant, name, *_EVER) if one.day in days]
    return found
