# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.recovery`: a server that finds a large log of a dead one.

Prints how soon it accepts, how soon everything can be asked for, and the most memory that it and
its flusher had resident.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from served import Server
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


def most_rss_bytes(pid: int) -> dict[str, int]:
    """VmHWM of a server and of its children."""
    children = [
        child
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return {
        name: int(Path(f"/proc/{one}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
        for name, one in zip(["server", "flusher"], [str(pid), *children], strict=False)
    }


def main() -> int:
    """Run; 1 where something is missing or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1_000)
    parser.add_argument("--store", type=Path, help="directory on the disk to be tried")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        store = Path(folder, "store")
        chunks, rows = write_log(store, args.megabytes << 20)
        server = Server(store)
        accepting_s = server.start()
        assert server.process
        started = time.monotonic()
        wait_for(server, chunks)
        nodes = server.wait_for(chunks, 60)
        queryable_s = time.monotonic() - started
        memory = most_rss_bytes(server.process.pid)
        server.stop()
    stored = sum(node["chunks"] for node in nodes), sum(node["sample_rows"] for node in nodes)
    result = {
        "log_mb": args.megabytes,
        "chunks": chunks,
        "sample_rows": rows,
        "stored_chunks": stored[0],
        "stored_sample_rows": stored[1],
        "accepting_s": round(accepting_s, 2),
        "queryable_s": round(queryable_s, 1),
        "most_mb": {name: size >> 20 for name, size in memory.items()},
    }
    print(json.dumps(result, indent=2))
    return 0 if stored == (chunks, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
