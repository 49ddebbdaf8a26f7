# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.recovery`: a server that finds a large log of a dead one.

Prints how soon after its start it accepts and acknowledges a chunk and everything can be asked for,
processor time, the most memory that it and its flusher had resident, and a recount of what the
files have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pyarrow.parquet as pq

from served import Server
from sonde.store.catalog import Catalog
from sonde.store.record import Record, digest_of
from sonde.store.wal import Wal
from stored_chunks import as_of, recorded, rows_of

NODES = 100


def write_log(store: Path, size_bytes: int) -> tuple[int, int]:
    """(chunks, sample rows) of a log of about that size, sealed in segments."""
    chunks = recorded()
    wal = Wal(store / "wal")
    now_ns = time.time_ns()
    count = written = rows = 0
    while written < size_bytes:
        group = []
        for _ in range(64):
            source = chunks[count % len(chunks)]
            node = f"node-{count % NODES:03d}"
            body = as_of(source, node, count, now_ns - count * 10**7)
            record = Record("default", node, digest_of("default", node, body), now_ns, body)
            group.append(wal.append(record))
            written += len(body)
            rows += rows_of(source, "sample")
            count += 1
        for one in group:
            one.result(60)
    wal.close()
    return count, rows


def kept_log(store: Path, size_bytes: int) -> tuple[int, int]:
    """As `write_log`, where there is none yet. Segments are never changed, so links to them do."""
    counts = store / "counts.json"
    if not counts.exists():
        counts.write_text(json.dumps(write_log(store, size_bytes)))
    chunks, rows = json.loads(counts.read_text())
    return chunks, rows


def wait_for(server: Server, chunks: int) -> None:
    """Until `chunks` chunks are stored, by the server's own counter: a question each second would
    take a part of the processors."""
    ends = time.monotonic() + 3_600
    while time.monotonic() < ends:
        text = server.get("/metrics")[1].decode()
        count = text.partition("\nsonde_store_chunks_stored_total ")[2].partition("\n")[0]
        if int(count or 0) >= chunks:
            return
        time.sleep(0.5)


def processes(pid: int) -> dict[str, str]:
    """The ids of a server and of its flusher."""
    children = [
        child
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return dict(zip(["server", "flusher"], [str(pid), *children], strict=False))


def most_rss_bytes(pid: str) -> int:
    """The most that a process has had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def cpu_s(pid: str) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run; 1 where something is missing or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--store", type=Path, help="directory on the disk to be tried")
    parser.add_argument("--log", type=Path, help="of it: a log that is kept for several runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        store = Path(folder, "store")
        if args.log:
            chunks, rows = kept_log(args.log, args.megabytes << 20)
            shutil.copytree(args.log / "wal", store / "wal", copy_function=os.link)
            store.chmod(0o700)
        else:
            chunks, rows = write_log(store, args.megabytes << 20)
        log_bytes = sum(path.stat().st_size for path in store.glob("wal/*/*.wal"))
        server = Server(store)
        accepting_s = server.start()
        assert server.process
        body = as_of(recorded()[0], "late", 0, time.time_ns())
        status, _ = server.send("late", body)
        taken_s = time.monotonic() - started_at(server.process.pid)
        assert status == 200
        chunks, rows = chunks + 1, rows + rows_of(body, "sample")
        wait_for(server, chunks)
        nodes = server.wait_for(chunks, 60)
        queryable_s = time.monotonic() - started_at(server.process.pid)
        own = processes(server.process.pid)
        used = {name: round(cpu_s(pid), 1) for name, pid in own.items()}
        memory = {name: most_rss_bytes(pid) >> 20 for name, pid in own.items()}
        size = sum(path.stat().st_size for path in store.rglob("*.parquet"))
        server.stop()
        recounted = recount(store)
    stored = sum(node["chunks"] for node in nodes), sum(node["sample_rows"] for node in nodes)
    result = {
        "load_average": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
        "log_mb": round(log_bytes / 1e6),
        "chunks": chunks,
        "sample_rows": rows,
        "stored_chunks": stored[0],
        "stored_sample_rows": stored[1],
        "recounted": recounted,
        "accepting_s": round(accepting_s, 2),
        "acknowledged_s": round(taken_s, 2),
        "queryable_s": round(queryable_s, 1),
        "cpu_s": used,
        "log_mb_a_cpu_s": round(log_bytes / 1e6 / used["flusher"], 1),
        "most_mb": memory,
        "parquet_bytes_a_log_byte": round(size / log_bytes, 3),
    }
    print(json.dumps(result, indent=2))
    is_right = stored == (chunks, rows) == tuple(recounted.values())
    return 0 if is_right else 1


def started_at(pid: int) -> float:
    """When a process was started, by the monotonic clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def recount(store: Path) -> dict[str, int]:
    """What the files have: distinct chunks, and rows of `sample`."""
    catalog = Catalog(store)
    digests: list[bytes] = []
    for one in catalog.files("default", "chunk"):
        column = pq.read_table(store / one.path, columns=["digest"]).column("digest")
        digests += column.to_pylist()
    files = catalog.files("default", "sample")
    rows = sum(pq.read_metadata(store / one.path).num_rows for one in files)
    catalog.close()
    is_once = len(set(digests)) == len(digests)
    return {"chunks": len(digests) if is_once else -1, "sample_rows": rows}


if __name__ == "__main__":
    sys.exit(main())
