# SPDX-License-Identifier: Apache-2.0
"""Questions are answered alike from rows and from their sums."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sonde.query import stored, stored_views
from sonde.query.selection import Selection
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope
from sonde.store import compaction
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact, sweep
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.tables import SUMMED_TABLE
from sonde.store.wal import Wal
from stored_chunks import as_of, recorded

CHUNKS = recorded()[::4]
BEGIN_NS = 1_800_000_000 * 10**9
S = 10**9
ME = Caller("me", "lab", frozenset(Scope))


def add(folder: Path, catalog: Catalog, numbers: range) -> None:
    wal = Wal(folder / "wal")
    for number in numbers:
        at_ns = BEGIN_NS + 20 * S * (1 + number)
        node = f"n{number % 3}"
        body = as_of(CHUNKS[number % len(CHUNKS)], node, number, at_ns)
        wal.append(Record("lab", node, digest_of("lab", node, body), at_ns, body)).result(10)
    wal.close()
    Flusher(folder, catalog).flush()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(compaction, "COMPACTED_FROM", 2)
    memory = Path("/dev/shm")  # there is nothing to be waited for
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield from made(Path(folder, "store"))


def made(folder: Path) -> Iterator[Service]:
    found = Service(folder, flushes=False)
    for begin in (0, 14):
        add(found.folder, found.catalog, range(begin, begin + 14))
    yield found
    found.close()


def answers(service: Service, wanted: Selection) -> dict[str, Any]:
    session = service.session(ME, wanted)
    try:
        return {
            "flame": stored.flame_graph(session, wanted).to_pylist(),
            "totals": stored.totals(session, wanted),
            "top": stored.top_functions(session, wanted).to_pylist(),
            "names": stored_views.names(session, wanted).to_pylist(),
            "processes": stored_views.processes(session, wanted).to_pylist(),
            "overview": stored_views.overview(session, wanted).to_pylist(),
        }
    finally:
        session.close()


def test_sums_answer_what_rows_do(service: Service) -> None:
    hour = BEGIN_NS, BEGIN_NS + 3_600 * S
    selections = [
        Selection(*hour),
        Selection(*hour, kind="blocked", nodes=["n1"]),
        Selection(hour[0], BEGIN_NS + 300 * S),  # a part of the files
    ]
    rows = [answers(service, wanted) for wanted in selections]
    compact(service.folder, service.catalog)
    (summed,) = service.catalog.files("lab", SUMMED_TABLE)
    (sample,) = service.catalog.files("lab", "sample")
    assert 2 * summed.row_count <= sample.row_count

    sums = [answers(service, wanted) for wanted in selections]

    assert rows[0]["totals"]["rows"] > rows[2]["totals"]["rows"] > 0
    for one, other in zip(rows, sums, strict=True):
        for name, found in one.items():
            assert plain(other[name]) == plain(found), name


def plain(found: Any) -> Any:
    """Sums of the same numbers in another order differ in their last bits, and so may the order of
    rows with equal sums."""
    if isinstance(found, list):
        return sorted((plain(one) for one in found), key=repr)
    if isinstance(found, dict):
        return {name: plain(one) for name, one in found.items()}
    return float(f"{found:.9g}") if isinstance(found, float) else found


def test_new_rows_are_added_to_sums(service: Service) -> None:
    wanted = Selection(BEGIN_NS, BEGIN_NS + 3_600 * S)
    compact(service.folder, service.catalog)
    add(service.folder, service.catalog, range(28, 40))
    session = service.session(ME, wanted)
    both = stored.totals(session, wanted)
    every = session.arrow(
        "SELECT count(*) AS n, sum(weight_ns) AS ns FROM sample WHERE kind = 'cpu'"
    )
    session.close()

    assert both["rows"] == every.column("n")[0].as_py()
    assert both["ns"] == pytest.approx(every.column("ns")[0].as_py())

    compact(service.folder, service.catalog)
    files = service.catalog.files("lab", SUMMED_TABLE)
    assert [Path(one.path).name for one in files] == [
        Path(one.path).name for one in service.catalog.files("lab", "sample")
    ]
    sweep(service.folder, service.catalog, 1 << 62)
    kept = {Path(one.path) for one in files}
    assert {
        p.relative_to(service.folder) for p in service.folder.rglob(f"{SUMMED_TABLE}/**/*.parquet")
    } == kept
