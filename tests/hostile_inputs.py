# SPDX-License-Identifier: Apache-2.0
"""Files made to cost their reader as much as they can: each a function of its size.

Used by the tests of what a file may cost. To write one:
`python tests/hostile_inputs.py KIND FILE [N]`.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))
from captures import START_NS, chunk, file_header, filled, meta

WIDE = "\N{GRINNING FACE}"
"""One such character makes Python hold four bytes for each character of its text."""
Event = dict[str, Any]


def _x(
    cat: str, name: str, ts: float, dur: float, tid: int = 1, pid: int = 1, **args: Any
) -> Event:
    where = {"pid": pid, "tid": tid, "args": args}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **where}


def _kernel(number: int, name: str = "k", ts: float = 0, dur: float = 20, **args: Any) -> Event:
    known = {"device": 0, "stream": 7, "correlation": number + 1, **args}
    return _x("kernel", name, ts or 1000 + 100 * number, dur, 7, **known)


def long_names(count: int, size: int = 15_000, end: str = WIDE) -> Iterator[Event]:
    for number in range(count):
        yield _kernel(number, os.urandom(40).hex() + "a" * size + end)


def small_names(count: int) -> Iterator[Event]:
    for number in range(count):
        yield _kernel(number, f"{number:x}a")


def host_names(count: int) -> Iterator[Event]:
    """Python functions, each with another name, by turns on some threads."""
    yield from (_kernel(number) for number in range(100))
    for number in range(count):
        yield _x("python_function", f"f{number}" + "x" * 40, 1000 + number, 1, 1 + number % 64)
    for number in range(100):
        yield _x("cuda_runtime", "cudaLaunchKernel", 1050 + 100 * number, 5, 1 + number % 64,
                 correlation=number + 1)  # fmt: skip


def threads(count: int, devices: int = 1) -> Iterator[Event]:
    """Each kernel late, and launched by a separate thread."""
    for number in range(count):
        yield _kernel(number, ts=1000 + 1000 * number, device=number % devices)
        yield _x("cuda_runtime", "cudaLaunchKernel", 990 + 1000 * number, 5, number, number,
                 correlation=number + 1)  # fmt: skip


def streams(count: int) -> Iterator[Event]:
    for number in range(count):
        yield _kernel(number, stream=number)


def nested(count: int) -> Iterator[Event]:
    """Functions within functions, all on one thread."""
    for number in range(count):
        yield _x("python_function", f"f.py({number % 7}): f", 1000 + number, 2 * (count - number))
    for number in range(50):
        yield _kernel(number)
        yield _x("cuda_runtime", "cudaLaunchKernel", 1090 + 100 * number, 5, correlation=number + 1)


def crossing(count: int) -> Iterator[Event]:
    """Intervals that overlap and do not nest."""
    yield from (_kernel(number) for number in range(50))
    for number in range(count):
        yield _x("cpu_op", "op", 1000 + number, count)


def counts(count: int) -> Iterator[Event]:
    """Kernels of which each name occurs another number of times."""
    at = number = 0
    while at < count:
        number += 1
        for _ in range(min(number, count - at)):
            at += 1
            yield _kernel(at, f"k{number}", ts=1000 + 300 * at, dur=10)
            yield _x("cuda_runtime", "cudaLaunchKernel", 990 + 300 * at, 5, correlation=at + 1)


def waits(count: int) -> Iterator[Event]:
    """Calls that wait for the device on many threads, beside kernels that all overlap."""
    for number in range(count):
        yield _kernel(number, "ncclDevKernel_AllReduce", ts=1000 + 10 * number, dur=5 * count,
                      device=number % 64)  # fmt: skip
        yield _x("cuda_runtime", "cudaDeviceSynchronize", 900 + number, 10 * count, number,
                 correlation=number + 1)  # fmt: skip


def same_correlation(count: int) -> Iterator[Event]:
    for number in range(count):
        yield _kernel(number, ts=1000 + 10 * number, dur=5, correlation=1)
        yield _x("cuda_runtime", "cudaStreamSynchronize", 900 + 10 * number, 5000, number % 3,
                 correlation=1)  # fmt: skip


def ranges(count: int) -> Iterator[Event]:
    """Steps by name, each within all before it."""
    for number in range(count):
        yield _x("user_annotation", f"ProfilerStep#{number}", 1000 + number, count)
        yield _kernel(number, f"k{number}", ts=1000 + number, dur=count)
        yield _x("cuda_runtime", "cudaLaunchKernel", 900 + number, 5, correlation=number + 1)


def copies(count: int) -> Iterator[Event]:
    for number in range(count):
        at = 1000 + 100 * number
        yield _x("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at, 20, 7, device=0,
                 stream=number % 900, correlation=number + 1, bytes=8)  # fmt: skip
        yield _x("cuda_runtime", "cudaMemcpyAsync", at - 50, 60, number % 900,
                 correlation=number + 1)  # fmt: skip


TRACES: dict[str, tuple[Callable[[int], Iterator[Event]], int]] = {
    "long_names": (long_names, 1_600),
    "small_names": (small_names, 180_000),
    "host_names": (host_names, 170_000),
    "threads": (threads, 80_000),
    "devices": (lambda count: threads(count, 250), 80_000),
    "streams": (streams, 180_000),
    "nested": (nested, 220_000),
    "crossing": (crossing, 240_000),
    "counts": (counts, 80_000),
    "waits": (waits, 70_000),
    "same_correlation": (same_correlation, 75_000),
    "ranges": (ranges, 60_000),
    "copies": (copies, 70_000),
}
"""By name: its events, and how many make 25 MB."""


def trace(path: Path, kind: str, count: int = 0) -> Path:
    """Write a trace of torch.profiler, compressed."""
    make, usual = TRACES[kind]
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write('{"traceEvents":[')
        for number, event in enumerate(make(count or usual)):
            text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            out.write("," + text if number else text)
        out.write("]}")
    return path


P = {"pid": 100, "start_ns": 1}
Tables = dict[str, list[dict[str, Any]]]


def _sampled(stacks: list[list[int]], frames: list[str], samples: list[dict[str, Any]]) -> Tables:
    return {
        "process": [{**P, "comm": "p", "exe": "p"}],
        "frame": [
            {"frame_id": n + 1, "kind": "user", "function": name, "binary": "app"}
            for n, name in enumerate(frames)
        ],
        "stack": [{"stack_id": n + 1, "frame_ids": ids} for n, ids in enumerate(stacks)],
        "sample": [
            {**P, "tid": 100, "kind": "cpu", "time_ns": START_NS + n, "weight": 1e6,
             "weight_ns": 1e6, "weight_count": 1.0, **row}
            for n, row in enumerate(samples)
        ],
    }  # fmt: skip


def named_frames(count: int, size: int, filling: str, end: str = "") -> Tables:
    names = [
        f"{number:06d}" + os.urandom(20).hex() + filling * size + end for number in range(count)
    ]
    stacks = [[number + 1] for number in range(count)]
    return _sampled(stacks, names, [{"stack_id": number + 1} for number in range(count)])


def deep_stacks(count: int, depth: int = 60_000) -> Tables:
    """One deep stack, which many threads were in."""
    ids = [number % 500 + 1 for number in range(depth)]
    samples = [{"stack_id": 1, "tid": 100 + number} for number in range(count)]
    return _sampled([ids], [f"function_{number}" * 20 for number in range(500)], samples)


def many_deep_stacks(count: int, depth: int = 4_000) -> Tables:
    stacks = [[(n * 7 + d * (n % 13 + 1)) % 500 + 1 for d in range(depth)] for n in range(count)]
    names = [f"function_{number}" for number in range(500)]
    samples = [{"stack_id": n + 1, "kind": kind, "weight_bytes": 1e9, "name": "heap"}
               for n in range(count) for kind in ("cpu", "mapped")]  # fmt: skip
    return _sampled(stacks, names, samples)


def many_threads(count: int) -> Tables:
    """Each thread waits for another one, and is sampled in a loader."""
    tables = _sampled(
        [[1]], ["take_gil"],
        [{"stack_id": 1, "tid": n, "kind": kind, "name": "futex" if kind == "blocked" else ""}
         for n in range(1, count) for kind in ("cpu", "blocked")],
    )  # fmt: skip
    tables["frame"][0]["file"] = "torch/utils/data/x.py"
    tables["thread"] = [{**P, "tid": n, "comm": f"t{n}"} for n in range(1, count)]
    tables["activity"] = [
        {**P, "tid": n, "time_ns": START_NS, "kind": "blocked", "name": "futex", "op": "futex",
         "count": 1, "ns": 10**9, "max_ns": 10**9, "waker_pid": 100, "waker_tid": count - n}
        for n in range(1, count)
    ] + [
        {**P, "tid": n, "time_ns": START_NS, "kind": "device", "name": "cuLaunchKernel",
         "op": "launch", "api": "cuda", "count": 9, "ns": 10**8, "max_ns": 10**7}
        for n in range(1, count)
    ]  # fmt: skip
    return tables


def many_processes(count: int) -> Tables:
    tables: Tables = {"process": [], "thread": [], "sample": [], "usage": [], "activity": []}
    for n in range(1, count):
        key = {"pid": n, "start_ns": n}
        tables["process"].append({**key, "comm": f"p{n}", "exe": "/x" * 40, "cgroup": "/a" * 20})
        tables["usage"].append({**key, "time_ns": START_NS, "cpu_ns": 5})
        tables["activity"].append({**key, "tid": n, "time_ns": START_NS, "kind": "runqueue",
                                   "count": 1, "ns": 10**6, "max_ns": 10**6})  # fmt: skip
    return tables


def long_reasons(count: int, size: int = 4_000) -> Tables:
    """A long name that is one name in the file, and a text in each row of an answer."""
    tables = many_threads(count)
    for row in tables["activity"]:
        row["name"] = "w" * size + WIDE
    return tables


def many_runs(count: int) -> Tables:
    tables = _sampled([[1]], ["f"], [{"stack_id": 1}])
    tables["device_run"] = [
        {**P, "tid": 100 + n % 3000, "start_time_ns": START_NS + 1000 * n, "stack_id": 1,
         "end_time_ns": START_NS + 1000 * n + 900, "kind": "kernel", "name": f"kernel_{n}",
         "source": "cupti", "weight": 1.0 if n % 2 else 7.0, "window": n // 9, "device": n % 300,
         "stream": n % 1000, "correlation": n, "grid": f"{n},1,1", "block": "1,1,1"}
        for n in range(1, count)
    ]  # fmt: skip
    return tables


def many_spans(count: int) -> Tables:
    tables = many_threads(1 + count // 20)
    tables["span"] = [
        {**P, "tid": 1 + n % (count // 20), "start_time_ns": START_NS + 9 * n, "stack_id": 1,
         "end_time_ns": START_NS + 9 * n + 7 * count, "kind": ("blocked", "device")[n % 2],
         "name": ("futex", "cuStreamSynchronize")[n % 2], "op": ("futex", "sync")[n % 2],
         "waker_pid": 100, "waker_tid": 1 + (n * 7) % (count // 20)}
        for n in range(count)
    ]  # fmt: skip
    tables["device_run"] = many_runs(2_000)["device_run"]
    return tables


def many_series(count: int) -> Tables:
    tables = _sampled([[1]], ["f"], [{"stack_id": 1}])
    tables["metric"] = [
        {"time_ns": START_NS + n, "series": ("hw.power", "sonde.gpu.info", "sonde.x")[n % 3],
         "labels": json.dumps({"hw.id": f"GPU-{n // 3}", "sonde.gpu.index": str(n % 9999)}),
         "value": 1.0 * n}
        for n in range(count)
    ]  # fmt: skip
    tables["event"] = [
        {"time_ns": START_NS, "kind": ("loss", "notice", "probe")[n % 3], "name": f"e{n}",
         "value": 1.0, "pid": n, "start_ns": n, "text": f"text {n}"}
        for n in range(count // 2)
    ]  # fmt: skip
    return tables


CAPTURES: dict[str, tuple[Callable[[int], Tables], int]] = {
    "wide": (lambda count: named_frames(count, 64_000, "a", WIDE), 390),
    "wide_4k": (lambda count: named_frames(count, 4_000, "a", WIDE), 6_000),
    "ascii": (lambda count: named_frames(count, 64_000, "a"), 390),
    "control": (lambda count: named_frames(count, 4_000, "\x01"), 6_000),
    "separators": (lambda count: named_frames(count, 1_300, "\u2028"), 6_000),
    "small": (lambda count: named_frames(count, 1, "a"), 120_000),
    "deep_stacks": (deep_stacks, 200_000),
    "many_deep_stacks": (many_deep_stacks, 700),
    "many_threads": (many_threads, 50_000),
    "many_processes": (many_processes, 60_000),
    "long_reasons": (long_reasons, 3_000),
    "many_runs": (many_runs, 100_000),
    "many_spans": (many_spans, 120_000),
    "many_series": (many_series, 150_000),
}
"""By name: its tables, and how much makes 25 MB, unpacked."""


def capture(path: Path, kind: str, count: int = 0) -> Path:
    """Write a capture of one chunk."""
    make, usual = CAPTURES[kind]
    tables = {name: filled(name, rows) for name, rows in make(count or usual).items()}
    path.write_bytes(file_header() + chunk(tables, **meta(0, last=True)))
    return path


def holes(path: Path, payload_bytes: int, raw_len: int, count: int) -> None:
    """Chunks with correct checksums whose payloads are holes in the file, between two good ones."""
    zeros = bytes(1 << 20)
    crc = 0
    for _ in range(payload_bytes >> 20):
        crc = zlib.crc32(zeros, crc)
    with path.open("wb") as out:
        out.write(file_header() + _good_chunk(0))
        for number in range(1, count + 1):
            about = json.dumps({**meta(number), "raw_len": raw_len, "tables": []}).encode()
            out.write(_chunk_head(about, payload_bytes, crc) + about)
            out.seek(payload_bytes, os.SEEK_CUR)
        out.write(_good_chunk(count + 1))


def metadata(path: Path, unit: str, count: int) -> None:
    """Chunks with a megabyte of metadata each, a list of `unit` again and again."""
    junk = ",".join([unit] * ((1_000_000) // (len(unit) + 1)))
    with path.open("wb") as out:
        out.write(file_header())
        for number in range(count):
            good = _good_chunk(number)
            end = 32 + int.from_bytes(good[8:12], "little")
            raw = good[32:end].decode().replace('"host": {', f'"host": {{"x": [{junk}], ', 1)
            about, payload = raw.encode(), good[end:]
            out.write(_chunk_head(about, len(payload), zlib.crc32(payload)) + about + payload)


def trace_head(path: Path, unit: str, size: int, key: str = "deviceProperties") -> None:
    """A trace with a list of `unit` before its events, again and again: `size` characters."""
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write(f'{{"{key}":[' + ",".join([unit] * (size // (len(unit) + 1))))
        out.write(f'],"traceEvents":[{json.dumps(_kernel(1))}]}}')


def _good_chunk(seq: int) -> bytes:
    tables = _sampled([[1]], ["f"], [{"stack_id": 1}])
    return chunk({name: filled(name, rows) for name, rows in tables.items()}, **meta(seq))


def _chunk_head(about: bytes, payload_bytes: int, payload_crc: int) -> bytes:
    known = len(about), zlib.crc32(about), payload_bytes, payload_crc
    head = struct.pack("<4sHHIIQI", b"SCHK", 1, 0, *known)
    return head + struct.pack("<I", zlib.crc32(head))


_DEEP = 300
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "holes": (lambda path: holes(path, 150 << 20, 1_000, 3), ".sonde"),
    "holes_as_claimed": (lambda path: holes(path, 150 << 20, 150 << 20, 1), ".sonde"),
    "metadata_lists": (lambda path: metadata(path, "[" * 12 + "]" * 12, 12), ".sonde"),
    "metadata_empty": (lambda path: metadata(path, "{}", 12), ".sonde"),
    "head_empty": (lambda path: trace_head(path, "{}", 15 << 20), ".json.gz"),
    "head_deep": (lambda path: trace_head(path, "[" * _DEEP + "]" * _DEEP, 15 << 20), ".json.gz"),
    "head_small": (lambda path: trace_head(path, "[" * _DEEP + "]" * _DEEP, 1 << 20), ".json.gz"),
    "head_other": (lambda path: trace_head(path, '{"":{}}', 4 << 20, "other"), ".json.gz"),
}
"""By name: what writes it, and the end of its name. They cost beside their rows and events."""


if __name__ == "__main__":
    pa.set_cpu_count(1)
    chosen, target, *size = sys.argv[1:]
    if chosen in FILES:
        FILES[chosen][0](Path(target))
        sys.exit()
    write = trace if chosen in TRACES else capture
    print(write(Path(target), chosen, int(size[0]) if size else 0).stat().st_size)
