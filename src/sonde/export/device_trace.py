# SPDX-License-Identifier: Apache-2.0
"""A trace of a process's device work as Chrome's JSON, in torch.profiler's categories.

Perfetto and chrome://tracing show it, and `sonde explain` reads it as it reads torch.profiler's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from sonde.export import strict_json
from sonde.model.device_trace import CALL_KINDS, DEVICE_KINDS, DeviceTrace, Kind

_BEFORE_NS: Final = 1_000_000_000
"""Times count from this long before the trace, as a time of 0 stands for none."""
_VERSIONED: Final = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
"""The end of the name of a CUDA function that torch.profiler leaves out."""
_DIRECTIONS: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_MEMORY: Final = {1: "Pageable", 2: "Pinned", 3: "Device", 4: "Array", 5: "Managed"}
_AT_ONCE: Final = 65_536
"""Rows that are made Python objects at once."""


class Out(Protocol):
    """What takes bytes: a file, or a compressed one."""

    def write(self, data: bytes, /) -> object:
        """Write these bytes."""


def write(
    trace: DeviceTrace,
    out: Out,
    process: str = "",
    threads: Mapping[int, str] | None = None,
    devices: Mapping[int, str] | None = None,
) -> int:
    """Write the trace; returns the number of events. `threads`, `devices`: names by number."""
    base_ns = trace.start_ns + trace.wall_offset_ns - _BEFORE_NS
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": base_ns,
        "deviceProperties": [{"id": k, "name": name} for k, name in (devices or {}).items()],
        "sonde": {"lost": dict(trace.lost), "cut": trace.is_cut},
    }
    out.write(strict_json.dumps(head).encode()[:-1] + b', "traceEvents": [\n')
    out.write(_meta("process_name", trace.pid, 0, process or f"process {trace.pid}"))
    for tid, name in (threads or {}).items():
        out.write(b",\n" + _meta("thread_name", trace.pid, tid, name))
    count = 0
    for event in _events(trace):
        out.write(event.encode("utf-8", "replace"))
        count += 1
    out.write(b"\n]}\n")
    return count


def _meta(what: str, pid: int, tid: int, name: str) -> bytes:
    event = {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
    return strict_json.dumps(event).encode()


def _events(trace: DeviceTrace) -> Iterator[str]:
    names = {number: json.dumps(text or "(unnamed)") for number, text in trace.names.items()}
    calls = {number: json.dumps(_VERSIONED.sub("", text) or "(unnamed)")
             for number, text in trace.names.items()}  # fmt: skip
    zero = trace.start_ns - _BEFORE_NS
    fields = trace.rows.dtype.names or ()
    for first in range(0, len(trace.rows), _AT_ONCE):
        for values in trace.rows[first : first + _AT_ONCE].tolist():
            row = dict(zip(fields, values, strict=True))
            start_ns, length_ns = row["start_ns"] - zero, row["end_ns"] - row["start_ns"]
            when = f'"ts":{_us(start_ns)},"dur":{_us(length_ns)}'
            if row["kind"] in CALL_KINDS:
                yield _call(row, trace.pid, when, calls.get(row["name"], '"(unnamed)"'))
            elif row["kind"] in DEVICE_KINDS:
                yield _run(row, when, names.get(row["name"], '"(unnamed)"'))


def _us(ns: int) -> str:
    """Microseconds with three decimals, without a float's rounding."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _call(row: Mapping[str, Any], pid: int, when: str, name: str) -> str:
    category = "cuda_runtime" if row["kind"] == Kind.RUNTIME else "cuda_driver"
    error = f',"error":{row["result"]}' if row["result"] else ""
    return (
        f',\n{{"ph":"X","cat":"{category}","name":{name},"pid":{pid},"tid":{row["tid"]},{when},'
        f'"args":{{"correlation":{row["correlation"]}{error}}}}}'
    )


def _run(row: Mapping[str, Any], when: str, name: str) -> str:
    where = f'"pid":{row["device"]},"tid":{row["stream"]},{when}'
    args = f'"correlation":{row["correlation"]},"device":{row["device"]},"stream":{row["stream"]}'
    if row["graph"]:
        args += f',"graph id":{row["graph"]},"graph node id":{row["node"]}'
    if row["kind"] == Kind.KERNEL:
        category = "kernel"
        grid = ",".join(str(row[f"grid_{axis}"]) for axis in range(3))
        block = ",".join(str(row[f"block_{axis}"]) for axis in range(3))
        args += f',"grid":[{grid}],"block":[{block}],"registers per thread":{row["registers"]}'
        args += f',"shared memory":{row["shared_bytes"]}'
    elif row["kind"] == Kind.SET:
        category, name = "gpu_memset", '"Memset (Device)"'
        args += f',"bytes":{row["bytes"]}'
    else:
        category, name = "gpu_memcpy", json.dumps(_copy_name(row["direction"], row["memory"]))
        args += f',"bytes":{row["bytes"]}'
    return f',\n{{"ph":"X","cat":"{category}","name":{name},{where},"args":{{{args}}}}}'


def _copy_name(direction: int, memory: int) -> str:
    """'Memcpy HtoD (Pinned -> Device)', as torch.profiler has it."""
    source, target = (_MEMORY.get(kind, "Unknown") for kind in (memory & 15, memory >> 4))
    return f"Memcpy {_DIRECTIONS.get(direction, 'Unknown')} ({source} -> {target})"
