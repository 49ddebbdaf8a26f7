# SPDX-License-Identifier: Apache-2.0
"""Writes capture files for tests of the reading side, straight from the layout of the format.

Independent of the recorder on purpose: what both agree on is the contract, abi/tables.json and the
framing. `scene()` is a small machine with one of everything; `Writer` writes any other.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

CONTRACT = json.loads((Path(__file__).parents[1] / "abi/tables.json").read_text())["tables"]

SECOND_NS = 1_000_000_000
START_NS = 500 * SECOND_NS
WALL_OFFSET_NS = 1_700_000_000 * SECOND_NS

TYPES = {
    "u32": pa.uint32(),
    "u64": pa.uint64(),
    "i32": pa.int32(),
    "f64": pa.float64(),
    "utf8": pa.string(),
    "bool": pa.bool_(),
    "list<u64>": pa.list_(pa.uint64()),
}

Row = dict[str, Any]
Rows = Iterable[dict[str, Any]]


def file_header(version: int = 1, magic: bytes = b"SONDE\r\n\x1a") -> bytes:
    return struct.pack("<8sH6x", magic, version)


def table_schema(name: str) -> pa.Schema:
    return pa.schema([(column, TYPES[kind]) for column, kind, _ in CONTRACT[name]["columns"]])


def arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def filled(name: str, rows: Rows) -> pa.Table:
    """A table of the contract; columns that a row leaves out are 0, '' or empty."""
    zero = {"utf8": "", "bool": True, "list<u64>": []}
    columns = CONTRACT[name]["columns"]
    complete = [
        {column: row.get(column, zero.get(kind, 0)) for column, kind, _ in columns} for row in rows
    ]
    return pa.Table.from_pylist(complete, table_schema(name))


def chunk(
    tables: dict[str, pa.Table], /, *, version: int = 1, after: bytes = b"", **meta: Any
) -> bytes:
    """`after`: what follows the tables."""
    payload = b""
    listed = []
    for name, table in tables.items():
        stream = arrow_stream(table)
        listed.append(
            {"name": name, "offset": len(payload), "length": len(stream), "rows": table.num_rows}
        )
        payload += stream
    payload += after
    whole_meta = {"raw_len": len(payload), "tables": listed, **meta}
    raw_meta = json.dumps(whole_meta).encode()
    compressed: bytes = pa.compress(payload, codec="zstd", asbytes=True)
    head = struct.pack(
        "<4sHHIIQI",
        b"SCHK",
        version,
        0,
        len(raw_meta),
        zlib.crc32(raw_meta),
        len(compressed),
        zlib.crc32(compressed),
    )
    return head + struct.pack("<I", zlib.crc32(head)) + raw_meta + compressed


def meta(
    seq: int = 0, start_ns: int = START_NS, seconds: float = 5.0, last: bool = False, **more: Any
) -> dict[str, Any]:
    host = {"name": "testbench", "kernel": "6.18.0", "cpus": 4, "hz": 99, "arch": "x86_64"}
    return {
        "seq": seq,
        "start_ns": start_ns,
        "end_ns": start_ns + int(seconds * SECOND_NS),
        "wall_offset_ns": WALL_OFFSET_NS,
        "capture": {"id": "5a1e", "version": "0.1.0", "host": host},
        "last": last,
        **more,
    }


@dataclass
class Writer:
    """Collects rows and interns stacks; `bytes()` cuts them into chunks by time."""

    seconds: float = 10.0
    chunk_seconds: float = 5.0
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {n: [] for n in CONTRACT})
    frame_ids: dict[tuple[str, str, str, int], int] = field(default_factory=dict)
    stack_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    """More of what the recorder knows of the host."""

    def process(
        self, pid: int, comm: str, *, ppid: int = 1, threads: Rows = (), **owner: Any
    ) -> dict[str, int]:
        key = {"pid": pid, "start_ns": pid * 10_000_000}
        self.rows["process"].append({**key, "ppid": ppid, "comm": comm, "exe": comm, **owner})
        for thread in threads or [{"tid": pid, "comm": comm}]:
            self.rows["thread"].append({**key, **thread})
        return key

    def frame(
        self,
        function: str,
        binary: str = "app",
        file: str = "",
        line: int = 0,
        kind: str = "",
        origin: str = "",
    ) -> int:
        key = (function, binary, file, line)
        if key not in self.frame_ids:
            number = self.frame_ids[key] = 1 << 63 | len(self.frame_ids) + 1
            kind = kind or ("kernel" if binary == "[kernel]" else "user")
            build_id = "" if binary.startswith("[") else f"{zlib.crc32(binary.encode()):08x}" * 5
            self.rows["frame"].append(
                {
                    "frame_id": number,
                    "kind": kind,
                    "function": function,
                    "binary": binary,
                    "build_id": build_id,
                    "offset": 0x1000 + 16 * len(self.frame_ids),
                    "file": file,
                    "line": line,
                    "origin": origin,
                }
            )
        return self.frame_ids[key]

    def stack(self, *root_first: str | tuple[Any, ...]) -> int:
        """Intern a stack given root first, each frame a name or the arguments of `frame`."""
        frames = [self.frame(*((f,) if isinstance(f, str) else f)) for f in root_first]
        key = tuple(reversed(frames))
        if key not in self.stack_ids:
            number = self.stack_ids[key] = len(self.stack_ids) + 1
            self.rows["stack"].append(
                {"stack_id": number, "frame_ids": list(key), "complete": True}
            )
        return self.stack_ids[key]

    def add(self, table: str, key: dict[str, int], **row: Any) -> None:
        self.rows[table].append({"time_ns": START_NS, **key, **row})

    def on_cpu(self, key: dict[str, int], tid: int, stack: int, samples: int) -> None:
        weights = {"weight_count": samples, "weight_ns": samples * SECOND_NS / 99}
        self.add("sample", key, kind="cpu", tid=tid, stack_id=stack, **weights)

    def wait(
        self,
        key: dict[str, int],
        tid: int,
        reason: str,
        seconds: float,
        *,
        count: int = 1,
        longest: float | None = None,
        stack: int = 0,
        kind: str = "blocked",
        call: str = "",
        waker: tuple[int, int] = (0, 0),
    ) -> None:
        ns = round(seconds * SECOND_NS)
        max_ns = ns // max(count, 1) if longest is None else round(longest * SECOND_NS)
        self.add(
            "activity",
            key,
            kind=kind,
            name=reason,
            op=call,
            tid=tid,
            count=count,
            ns=ns,
            max_ns=max_ns,
            waker_pid=waker[0],
            waker_tid=waker[1],
        )
        weights = {"weight_count": count, "weight_ns": float(ns)}
        self.add("sample", key, kind=kind, name=reason, tid=tid, stack_id=stack, **weights)

    def single_waits(
        self,
        key: dict[str, int],
        tid: int,
        reason: str,
        lengths_ms: Iterable[float],
        *,
        stack: int = 0,
        call: str = "",
    ) -> None:
        """Waits that are known one by one, all beginning in the first second."""
        for number, ms in enumerate(lengths_ms):
            begin = START_NS + number
            row = {"start_time_ns": begin, "end_time_ns": begin + round(ms * 1e6), "tid": tid}
            about = {"kind": "blocked", "name": reason, "op": call, "stack_id": stack}
            self.rows["span"].append({**key, **row, **about})

    def calls(
        self,
        key: dict[str, int],
        tid: int,
        function: str,
        *,
        count: int,
        seconds: float,
        op: str,
        moved: int = 0,
        direction: str = "",
        status: int = 0,
        stack: int = 0,
        api: str = "opencl",
    ) -> None:
        ns = round(seconds * SECOND_NS)
        self.add(
            "activity",
            key,
            kind="device",
            name=function,
            api=api,
            op=op,
            direction=direction,
            status=status,
            tid=tid,
            count=count,
            ns=ns,
            bytes=moved,
            max_ns=ns // max(count, 1),
        )
        weights = {"weight_count": count, "weight_ns": float(ns), "weight_bytes": float(moved)}
        self.add("sample", key, kind="device", name=function, tid=tid, stack_id=stack, **weights)

    def event(self, kind: str, name: str, value: float, text: str = "") -> None:
        self.add("event", {}, kind=kind, name=name, value=value, text=text)

    def usage(self, key: dict[str, int], second: int = 0, **counts: int) -> None:
        time_ns = START_NS + second * SECOND_NS
        self.rows["usage"].append({"time_ns": time_ns, **key, **counts})

    def metric(self, series: str, values: Iterable[float]) -> None:
        for second, value in enumerate(values):
            time_ns = START_NS + second * SECOND_NS
            self.rows["metric"].append({"time_ns": time_ns, "series": series, "value": value})

    def chunks(self, last: bool = True) -> list[bytes]:
        count = max(1, round(self.seconds / self.chunk_seconds))
        length_ns = int(self.chunk_seconds * SECOND_NS)
        dictionaries = {n: filled(n, self.rows[n]) for n in ("stack", "frame", "process", "thread")}
        made = []
        for seq in range(count):
            start_ns = START_NS + seq * length_ns
            mine = {
                name: filled(name, [r for r in rows if _in_chunk(r, start_ns, length_ns)])
                for name, rows in self.rows.items()
                if name not in dictionaries
            }
            about = meta(seq, start_ns, self.chunk_seconds, last=last and seq == count - 1)
            about["capture"]["host"] = about["capture"]["host"] | self.host
            made.append(chunk({**dictionaries, **mine}, **about))
        return made

    def bytes(self, last: bool = True) -> bytes:
        return file_header() + b"".join(self.chunks(last))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


def _in_chunk(row: dict[str, Any], start_ns: int, length_ns: int) -> bool:
    return bool(start_ns <= row.get("time_ns", row.get("start_time_ns", 0)) < start_ns + length_ns)


LIBC = "libc.so.6"
KERNEL = "[kernel]"


def scene() -> Writer:
    """Ten seconds of a machine: training feeds a device, a service polls, daemons sleep."""
    w = Writer()
    train = w.process(
        4211,
        "python3",
        threads=[{"tid": 4211, "comm": "python3"}, {"tid": 4215, "comm": "loader"}],
        user="ada",
        job="77",
        step="0",
    )
    build = w.process(5000, "cc1 <\"&'>")
    sleeper = w.process(900, "cron", user="root", unit="cron.service")
    kthread = w.process(17, "kworker/0:1", ppid=2)

    w.usage(train, 0, cpu_ns=4_000_000_000, runqueue_ns=1_000_000, voluntary=900, migrations=3)
    w.usage(train, 6, cpu_ns=50_000_000, major_faults=2, read_bytes=3_000_000, reclaim_ns=70_000)
    w.usage(build, 0, cpu_ns=2_500_000_000, involuntary=40, written_bytes=81_920)

    main = ("_start", ("main", "python3", "/src/python.c", 15))
    step = (*main, ("train_step", "app.so", "/src/train.cc", 120))
    futex = (("do_futex", KERNEL), ("schedule", KERNEL))
    w.on_cpu(train, 4211, w.stack(*step, ("memmove", LIBC)), 300)
    w.on_cpu(train, 4211, w.stack(*step, ("std::vector<float>::push_back(float&&)", "app.so")), 100)
    w.on_cpu(train, 4215, w.stack("_start", ("decode", "libjpeg.so.62")), 150)
    w.on_cpu(train, 4215, w.stack("_start", ("", "libjpeg.so.62")), 30)
    w.on_cpu(build, 5000, w.stack("_start", ("main", "cc1"), ("parse", "cc1")), 20)
    w.on_cpu(build, 5000, w.stack("_start", ("main", "cc1"), ("fold", "cc1"), ("fold", "cc1")), 40)
    w.on_cpu(kthread, 17, w.stack(("kthread", KERNEL), ("process_one_work", KERNEL)), 10)

    waiting = w.stack(*step, ("pthread_cond_wait", LIBC), *futex)
    w.wait(*(train, 4211, "futex", 4.0), count=400, stack=waiting, call="futex", waker=(4211, 4215))
    w.wait(train, 4211, "futex", 0.25, kind="runqueue", count=400, stack=waiting, call="futex")
    w.wait(train, 4215, "read", 2.5, count=25, stack=w.stack("_start", ("read", LIBC)), call="read")
    w.wait(build, 5000, "preempted", 3.0, kind="runqueue", count=90, stack=w.stack("_start"))
    w.wait(sleeper, 900, "sleep", 10.0, count=0, longest=10.0, call="clock_nanosleep")
    w.wait(kthread, 17, "kernel thread", 9.0, count=100)

    enqueue = w.stack(*step, ("clEnqueueWriteBuffer", "libOpenCL.so.1"))
    back = w.stack(*step, ("read_back", "app.so"))
    finish = w.stack(*step, ("clFinish", "libOpenCL.so.1"))
    h2d: Row = {"op": "copy", "direction": "h2d", "moved": 4_000_000_000, "stack": enqueue}
    d2h: Row = {"op": "copy", "direction": "d2h", "moved": 1_000_000_000, "stack": back}
    failed: Row = {"op": "copy", "direction": "d2h", "status": -30}
    w.calls(train, 4211, "clEnqueueWriteBuffer", count=1000, seconds=0.5, **h2d)
    w.calls(train, 4211, "clEnqueueReadBuffer", count=999, seconds=0.75, **d2h)
    w.calls(train, 4211, "clEnqueueReadBuffer", count=1, seconds=0.001, **failed)
    w.calls(train, 4211, "clFinish", count=1000, seconds=2.0, op="sync", stack=finish)
    w.metric("sonde.agent.cpu_ns", [1e6, 2e6, 3e6])
    w.event("probe", "probe_refused", 1, "would single-step")
    return w
