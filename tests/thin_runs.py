# SPDX-License-Identifier: Apache-2.0
"""`python tests/thin_runs.py RUNS OUT`: cut recorded runs of bench/explain down to a few steps.

What is left is enough for the verdict and small enough for the repository: device operations and
calls of a stretch, the longer Python functions around them, and of the machine's capture the waits
and samples of that process. Nothing is changed but left out.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import captures
from sonde.query.capture import Capture, read

OPERATIONS = 700
LONGEST_US = 420_000
SHORTEST_PYTHON_US = 25
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
ARGS = {
    *("device", "stream", "correlation", "grid", "bytes"),
}
UNREAD = ("cudaStreamIsCapturing", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery")


def stretch_of(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Begin and end (µs) of the part that is kept."""
    operations = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in DEVICE)
    first = len(operations) // 10
    begin = operations[first][0]
    last = min(first + OPERATIONS, len(operations) - 1)
    end = min(operations[last][1], begin + LONGEST_US)
    return begin - 300, end + 50


def thin_trace(source: Path) -> tuple[dict[str, Any], tuple[float, float]]:
    """The trace's kept part, and which it is."""
    with gzip.open(source) as file:
        trace = json.load(file)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin, end = stretch_of(events)
    kept = []
    launched = set()
    for event in events:
        category, start, stop = event.get("cat"), event["ts"], event["ts"] + event["dur"]
        if category in DEVICE and begin <= start and stop <= end:
            launched.add(event["args"].get("correlation"))
            kept.append(event)
        elif (
            category == "python_function"
            and event["dur"] >= SHORTEST_PYTHON_US
            and stop > begin
            and start < end
        ):
            kept.append(event)
    for event in events:
        if event.get("cat") in CALLS and not event["name"].startswith(UNREAD):
            within = event["ts"] + event["dur"] > begin and event["ts"] < end
            if within or event["args"].get("correlation") in launched:
                kept.append(event)
    for event in kept:
        event["args"] = {k: v for k, v in event.get("args", {}).items() if k in ARGS}
    names = [e for e in trace["traceEvents"] if e.get("ph") == "M"]
    pids = {e["pid"] for e in kept}
    names = [e for e in names if e["name"] in ("process_name", "thread_name") and e["pid"] in pids]
    properties = [
        {key: one[key] for key in ("id", "name", "numSms") if key in one}
        for one in trace["deviceProperties"]
    ]
    made = {
        "schemaVersion": 1,
        "deviceProperties": properties,
        "baseTimeNanoseconds": trace["baseTimeNanoseconds"],
        "traceEvents": sorted(kept, key=lambda e: e["ts"]) + names,
    }
    return made, (begin, end)


def thin_capture(capture: Capture, pid: int, begin_ns: int, end_ns: int) -> bytes:
    """The rows of one process between two instants of the day, as a capture."""
    info, tables = capture.info, capture.tables
    low, high = begin_ns - info.wall_offset_ns, end_ns - info.wall_offset_ns

    def between(table: pa.Table, start: str, end: str) -> pa.Table:
        mine = pc.equal(table.column("pid"), pid)
        late = pc.greater(table.column(end), max(0, low))
        early = pc.less(table.column(start), high)
        return table.filter(pc.and_(mine, pc.and_(late, early)))

    def plain(table: pa.Table) -> pa.Table:
        columns = [
            c.cast(pa.string()) if pa.types.is_dictionary(c.type) else c for c in table.columns
        ]
        return pa.table(columns, names=table.column_names)

    span = between(tables["span"], "start_time_ns", "end_time_ns")
    sample = between(tables["sample"], "time_ns", "time_ns")
    sample = sample.filter(pc.equal(sample.column("kind"), "cpu"))
    used = pa.concat_arrays([*span.column("stack_id").chunks, *sample.column("stack_id").chunks])
    stack = tables["stack"]
    stack = stack.filter(pc.is_in(stack.column("stack_id"), value_set=used))
    frames = stack.column("frame_ids").combine_chunks().flatten()
    frame = tables["frame"]
    frame = frame.filter(pc.is_in(frame.column("frame_id"), value_set=frames))
    kept = {"span": span, "sample": sample, "stack": stack, "frame": frame}
    for name in ("process", "thread"):
        table = tables[name]
        kept[name] = table.filter(pc.equal(table.column("pid"), pid))
    about = captures.meta(seq=0, start_ns=info.start_ns, last=True)
    about |= {"end_ns": info.end_ns, "wall_offset_ns": info.wall_offset_ns}
    about["capture"] = {"id": info.id, "version": info.version, "host": dict(info.host)}
    made = captures.chunk({name: plain(table) for name, table in kept.items()}, **about)
    return captures.file_header() + made


def main() -> None:
    runs, out = Path(sys.argv[1]), Path(sys.argv[2])
    known: dict[str, Capture] = {}
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        truth = json.loads((folder / "truth.json").read_text())
        trace, (begin, end) = thin_trace(folder / "trace.json.gz")
        base = trace["baseTimeNanoseconds"]
        name = truth["kind"]
        packed = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 9, mtime=0)
        (out / f"{name}.json.gz").write_bytes(packed)
        waits = truth["waits"]
        if waits not in known:
            known[waits] = read(runs / waits)
        window = (base + round(begin * 1e3), base + round(end * 1e3))
        (out / f"{name}.sonde").write_bytes(thin_capture(known[waits], truth["pid"], *window))


if __name__ == "__main__":
    main()
