# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service`: simulated agents replay real chunks; what was acknowledged is counted.

Each agent sends one chunk every `--period` seconds over a separate connection; when no answer
comes it sends the chunk again. At the end every acknowledged chunk must be in the store once, and
the sample rows must be those of the source.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from served import Server
from stored_chunks import as_of, recorded, rows_of

QUERIES = 5
STALL_S = 0.5


@dataclass(slots=True)
class Tally:
    """What the agents saw."""

    acks_s: list[float] = field(default_factory=list)
    stalled_seconds: set[int] = field(default_factory=set)
    """Seconds before the end in which an acknowledgement took longer than STALL_S."""
    failures: int = 0
    sample_rows: int = 0
    sent_bytes: int = 0
    rss_bytes: list[int] = field(default_factory=list)


async def agent(number: int, port: int, ends: float, period_s: float, tally: Tally) -> None:
    """One agent: connects, sends, waits."""
    chunks = CHUNKS
    node = f"node-{number:04d}"
    await asyncio.sleep(period_s * number / AGENTS)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seq = 0
    due = time.monotonic()
    while due < ends:
        source = chunks[(number + seq) % len(chunks)]
        body = as_of(source, node, seq, time.time_ns())
        head = (
            f"POST /v1/chunks HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Sonde-Node: {node}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        started = time.monotonic()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if answer.startswith(b"HTTP/1.1 200"):
            tally.acks_s.append(time.monotonic() - started)
            if tally.acks_s[-1] > STALL_S:
                tally.stalled_seconds.add(round(time.monotonic() - ends))
            tally.sample_rows += rows_of(source, "sample")
            tally.sent_bytes += len(body)
            seq += 1
        else:
            tally.failures += 1
        due += period_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    writer.close()


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its children."""
    found = 0
    children = [  # of every thread: another than the first starts the flusher
        child
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    for one in [str(pid), *children]:
        try:
            status = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        found += int(status.split("\nPss:")[1].split()[0]) << 10
    return found


async def watch(pid: int, ends: float, tally: Tally) -> None:
    """Note the server's memory."""
    while time.monotonic() < ends:
        tally.rss_bytes.append(memory_of(pid))
        await asyncio.sleep(1)


async def load(server: Server, seconds: float, period_s: float) -> Tally:
    """All agents, for so long."""
    tally = Tally()
    assert server.process
    ends = time.monotonic() + seconds
    await asyncio.gather(
        watch(server.process.pid, ends, tally),
        *(agent(number, server.port, ends, period_s, tally) for number in range(AGENTS)),
    )
    return tally


def main() -> int:
    """Run, print JSON; 1 where a count is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--period", type=float, default=10)
    parser.add_argument("--store", type=Path)
    args = parser.parse_args()
    global AGENTS
    AGENTS = args.agents
    with (
        tempfile.TemporaryDirectory(dir=args.store) as folder,
        Server(Path(folder, "store")) as server,
    ):
        tally = asyncio.run(load(server, args.seconds, args.period))
        count = len(tally.acks_s)
        flushed = time.monotonic()
        nodes = server.wait_for(count, 300)
        lag_s = time.monotonic() - flushed
        stored = sum(node["chunks"] for node in nodes)
        rows = sum(node["sample_rows"] for node in nodes)
        totals = server.ask("totals", **{"from": 0, "kind": "cpu"})
        asked: dict[str, float] = {}
        for question, more in (
            ("flamegraph", {}),
            ("flamegraph", {"node": "node-0001"}),
            ("top", {}),
            ("series", {"series": "sonde.agent.cpu_ns", "node": "node-0001"}),
            ("nodes", {}),
        ):
            times = []
            for _ in range(QUERIES):
                started = time.monotonic()
                server.ask(question, **{"from": 0, **more})
                times.append(time.monotonic() - started)
            asked[f"{question}{' of a node' if more else ''}"] = statistics.median(times)
        of_server = {
            name: float(value)
            for name, _, value in (
                line.partition(" ")
                for line in server.get("/metrics")[1].decode().splitlines()
                if line.startswith("sonde_server_log_")
            )
        }
        store_bytes = sum(p.stat().st_size for p in Path(folder).rglob("*.parquet"))
    acks = sorted(tally.acks_s)
    result = {
        "agents": AGENTS,
        "seconds": args.seconds,
        "chunks": count,
        "mb_a_second": round(tally.sent_bytes / args.seconds / 1e6, 2),
        "ack_p50_ms": round(1e3 * acks[count // 2], 1),
        "ack_p99_ms": round(1e3 * acks[int(count * 0.99)], 1),
        "ack_max_ms": round(1e3 * acks[-1], 1),
        "sync_mean_ms": round(
            1e3
            * of_server["sonde_server_log_sync_seconds_total"]
            / of_server["sonde_server_log_syncs_total"],
            1,
        ),
        "sync_max_ms": round(1e3 * of_server["sonde_server_log_longest_sync_seconds"], 1),
        "memory_most_mb": max(tally.rss_bytes) >> 20,
        "memory_median_mb": int(statistics.median(tally.rss_bytes)) >> 20,
        "stalled_seconds": len(tally.stalled_seconds),
        "not_acknowledged": tally.failures,
        "stored": stored,
        "sample_rows_sent": tally.sample_rows,
        "sample_rows_stored": rows,
        "cpu_rows": totals["rows"],
        "queryable_after_s": round(lag_s, 1),
        "parquet_bytes_a_sent_byte": round(store_bytes / tally.sent_bytes, 3),
        "query_ms": {name: round(1e3 * seconds, 1) for name, seconds in asked.items()},
    }
    print(json.dumps(result, indent=2))
    return 0 if stored == count and rows == tally.sample_rows else 1


AGENTS = 1_000
CHUNKS = recorded()

if __name__ == "__main__":
    sys.exit(main())
