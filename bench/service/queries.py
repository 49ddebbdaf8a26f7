# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.queries`: questions over a day of 100 nodes, beside DuckDB alone.

The store is made of recorded chunks through the log, the flusher and compaction, as a server does
it: 100 nodes, 24 hours, 50 million rows of `sample`. Each question is asked over HTTP of a real
server, and DuckDB is asked the same of the same files. Also prints bytes a row.
"""

from __future__ import annotations

import argparse
import calendar
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import duckdb

from served import Server
from sonde.store import compaction
from sonde.store.catalog import Catalog
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.tables import DICTIONARIES
from sonde.store.wal import Wal
from stored_chunks import as_of, meta_of, recorded, rows_of, with_meta

KEPT = ("sample", "stack", "frame", "process", "thread", "metric")
"""Tables that the questions are about; the others of a chunk are left out."""
NODES, HOURS = 100, 24
SERIES = "hw.gpu.utilization"
SOME = [f"node-{number:03d}" for number in range(23)]
"""Nodes with some 200 series of that name."""
AT_ONCE = 2_000
"""Chunks of the log before it is flushed."""


def fill(store: Path, rows: int, day_ns: int) -> int:
    """Make a day of a store with about `rows` rows of `sample`; returns how many there are."""
    sources = [_without_others(chunk) for chunk in recorded()]
    counts = [rows_of(source, "sample") for source in sources]
    total = round(rows / statistics.mean(counts))
    step_ns = HOURS * 3_600 * 10**9 // total
    catalog = Catalog(store)
    flusher: Flusher | None = None
    written = 0
    for begin in range(0, total, AT_ONCE):
        wal = Wal(store / "wal")
        waiting = []
        for number in range(begin, min(begin + AT_ONCE, total)):
            node = f"node-{number % NODES:03d}"
            kind = (number % NODES + number // NODES) % len(sources)
            at_ns = day_ns + number * step_ns
            body = as_of(sources[kind], node, number, at_ns)
            written += counts[kind]
            digest = digest_of("default", node, body)
            waiting.append(wal.append(Record("default", node, digest, at_ns, body)))
        for one in waiting:
            one.result(60)
        wal.close()
        flusher = flusher or Flusher(store, catalog)
        flusher.flush()
        compaction.compact(store, catalog)
        compaction.sweep(store, catalog, time.time_ns() + 10**12)
    compaction.COMPACTED_FROM = 2  # as when an hour is over
    while compaction.compact(store, catalog).gone:
        pass
    compaction.sweep(store, catalog, time.time_ns() + 10**12)
    catalog.close()
    return written


def _without_others(chunk: bytes) -> bytes:
    meta = meta_of(chunk)
    meta["tables"] = [entry for entry in meta["tables"] if entry["name"] in KEPT]
    return with_meta(chunk, meta)


def sizes(store: Path) -> dict[str, dict[str, float]]:
    """By table: files, rows, bytes, bytes a row."""
    catalog = Catalog(store)
    found: dict[str, dict[str, float]] = {}
    for one in catalog.files():
        entry = found.setdefault(one.name, {"files": 0, "rows": 0, "bytes": 0})
        entry["files"] += 1
        entry["rows"] += one.row_count
        entry["bytes"] += one.size_bytes
    catalog.close()
    for entry in found.values():
        entry["bytes_a_row"] = round(entry["bytes"] / max(entry["rows"], 1), 2)
    return found


class Peer:
    """DuckDB with the files of the store, two threads."""

    def __init__(self, store: Path) -> None:
        catalog = Catalog(store)
        self._files: dict[str, list[Any]] = {}
        for one in catalog.files():
            self._files.setdefault(one.name, []).append((one, str(store / one.path)))
        catalog.close()
        self._connection = duckdb.connect(config={"threads": 2})

    def _source(self, name: str, start_ns: int, end_ns: int) -> str:
        paths = [
            f"'{path}'"
            for one, path in self._files.get(name, [])
            if one.name in DICTIONARIES or (one.max_ns >= start_ns and one.min_ns < end_ns)
        ]
        return f"read_parquet([{', '.join(paths)}])"

    def flame(self, start_ns: int, end_ns: int, node: str = "") -> None:
        """Stacks with weights and the names of their frames."""
        of_node = f"AND node = '{node}'" if node else ""
        weights = self._connection.sql(
            "SELECT s.stack, s.ns, any_value(k.frame_keys) AS frame_keys FROM (SELECT stack,"
            f" sum(weight_ns) AS ns FROM {self._source('sample', start_ns, end_ns)} WHERE"
            f" kind = 'cpu' AND time_ns >= {start_ns} AND time_ns < {end_ns} {of_node}"
            " GROUP BY stack ORDER BY ns DESC LIMIT 20000) s LEFT JOIN"
            f" {self._source('stack', start_ns, end_ns)} k ON k.key = s.stack GROUP BY ALL"
        ).to_arrow_table()
        self._connection.register("weights", weights)
        self._connection.sql(
            'SELECT key, any_value(function), any_value("binary") FROM'
            f" {self._source('frame', start_ns, end_ns)} WHERE key IN"
            " (SELECT unnest(frame_keys) FROM weights) GROUP BY key"
        ).to_arrow_table()

    def series(self, start_ns: int, end_ns: int, name: str, nodes: Sequence[str] = ()) -> None:
        """A metric of all nodes, or of these, in steps."""
        step = max(1, (end_ns - start_ns) // 1_440)
        of_nodes = f"AND node IN {tuple(nodes)}" if nodes else ""
        self._connection.sql(
            f"SELECT node, labels, (time_ns - {start_ns}) // {step} AS step, avg(value),"
            f" min(value), max(value) FROM {self._source('metric', start_ns, end_ns)}"
            f" WHERE series = '{name}' AND time_ns >= {start_ns} AND time_ns < {end_ns} {of_nodes}"
            " GROUP BY ALL ORDER BY ALL"
        ).to_arrow_table()


def timed_ms(work: Callable[[], object], most: int) -> list[float]:
    """Times of up to `most` runs in ms, sorted; fewer where they take long."""
    found: list[float] = []
    began = time.monotonic()
    while len(found) < most and time.monotonic() - began < 60:
        started = time.monotonic()
        work()
        found.append(1e3 * (time.monotonic() - started))
    return sorted(found)


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(server: Server, peer: Peer, day_ns: int, runs: int) -> dict[str, Any]:
    """Of each question: median, 95th percentile and mean processor time in ms, of the server and of
    DuckDB alone (with the caller's own)."""
    assert server.process
    draw = random.Random(1)
    hour_ns = 3_600 * 10**9
    places: dict[str, tuple[int, int, str]] = {}

    def place(name: str) -> tuple[int, int, str]:
        start = day_ns + draw.randrange(HOURS) * hour_ns
        places[name] = start, start + hour_ns, f"node-{draw.randrange(NODES):03d}"
        return places[name]

    def ask(question: str, start_ns: int, end_ns: int, **more: str | list[str]) -> None:
        server.ask(question, **{"from": start_ns / 1e9, "to": end_ns / 1e9, **more})

    def node_hour() -> None:
        start, end, node = place("node")
        ask("flametree", start, end, node=node)

    def peer_node_hour() -> None:
        peer.flame(*place("node"))

    def series() -> None:
        start, end, _ = place("series")
        ask("series", start, end, series=SERIES)

    def peer_series() -> None:
        start, end, _ = place("series")
        peer.series(start, end, SERIES)

    def some_series() -> None:
        start, end, _ = place("series")
        ask("series", start, end, series=SERIES, node=SOME)

    def peer_some_series() -> None:
        start, end, _ = place("series")
        peer.series(start, end, SERIES, SOME)

    day = day_ns, day_ns + HOURS * hour_ns
    questions: tuple[tuple[str, int, Callable[[], object], Callable[[], object]], ...] = (
        ("node_hour_flame_graph", runs, node_hour, peer_node_hour),
        ("hour_of_200_series", runs, some_series, peer_some_series),
        ("hour_of_a_series_of_all_nodes", runs, series, peer_series),
        (
            "day_flame_graph_of_all_nodes",
            max(3, runs // 5),
            lambda: ask("flametree", *day),
            lambda: peer.flame(*day),
        ),
    )
    found = {}
    for name, most, own, alone in questions:
        own()
        alone()
        result = {}
        for who, work, pid in (("server", own, server.process.pid), ("duckdb", alone, os.getpid())):
            before_s = cpu_s(pid)
            times = timed_ms(work, most)
            result[who] = {
                "runs": len(times),
                "median_ms": round(statistics.median(times), 1),
                "cpu_ms": round(1e3 * (cpu_s(pid) - before_s) / len(times), 1),
                "p95_ms": round(times[min(len(times) - 1, int(0.95 * len(times)))], 1),
            }
        found[name] = result
    return found


def _series(rows: list[dict[str, Any]]) -> int:
    return len({(row["node"], row["labels"]) for row in rows})


def main() -> int:
    """Run, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--store", type=Path, help="a store to be made, or made before, and kept")
    args = parser.parse_args()
    today = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86_400))
    day_ns = calendar.timegm(time.strptime(today, "%Y-%m-%d")) * 10**9
    with tempfile.TemporaryDirectory() as folder:
        store = args.store or Path(folder, "store")
        made_s = 0.0
        if not (store / "catalog.sqlite").exists():
            store.mkdir(mode=0o700, parents=True)
            started = time.monotonic()
            fill(store, args.rows, day_ns)
            made_s = time.monotonic() - started
        found = sizes(store)
        with Server(store) as server:
            answers = measured(server, Peer(store), day_ns, args.runs)
            hour = {"from": day_ns / 1e9, "to": day_ns / 1e9 + 3_600, "series": SERIES}
            counts = [
                _series(server.ask("series", **hour, **more)) for more in ({}, {"node": SOME})
            ]
    result = {
        "load_average": round(os.getloadavg()[0], 1),
        "made_s": round(made_s, 1),
        "tables": found,
        "series_in_an_hour": counts[0],
        "series_of_some_nodes": counts[1],
        "questions": answers,
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
