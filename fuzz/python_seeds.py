# SPDX-License-Identifier: Apache-2.0
"""Seeds of the Python targets: small traces, captures and records, written here."""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable

from opentelemetry.proto.profiles.v1development import profiles_pb2

import captures
import cpython_heap
from sonde.collect import inject_abi as abi

_RUN = {"ph": "X", "pid": 0, "tid": 7}
_CALL = {"ph": "X", "pid": 1, "tid": 1}
_LAUNCH = {"device": 0, "stream": 7, "correlation": 7, "grid": [4, 1, 1]}
_COPY = {"stream": 7, "bytes": 64, "device": 0}
KINETO = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "H200", "numSms": 132, "pciBusID": 1}],
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        _CALL | {"cat": "cpu_op", "name": "aten::mm", "ts": 10.5, "dur": 5},
        _CALL
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 12, "dur": 2}
        | {"args": {"correlation": 7}},
        _RUN | {"cat": "kernel", "name": "gemm", "ts": 15, "dur": 3, "args": _LAUNCH},
        _RUN
        | {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 19, "dur": 2}
        | {"args": _COPY},
        _RUN | {"cat": "gpu_memset", "name": "Memset", "ts": 22, "dur": 1},
        _CALL | {"cat": "python_function", "name": "/a/b.py(3): f", "ts": 1},
        _CALL | {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 9},
    ],
    "baseTimeNanoseconds": 1700000000000000000,
}
PERF = """\
# captured
python 100/101 [002] 12.345678901:   10101010 cpu-clock:
\tffffffff81000000 do_syscall_64+0x1 ([kernel.kallsyms])
\t    7f1234 f+0x10 (/usr/lib/libx.so)

python 100/101 [002] 12.5: sched:sched_switch: prev_comm=python prev_pid=101 prev_prio=120 \
prev_state=S ==> next_comm=swapper next_pid=0 next_prio=120
swapper 0 [002] 12.6: sched:sched_waking: comm=python pid=101 prio=120 target_cpu=002
swapper 0 [002] 12.7: sched:sched_switch: prev_comm=swapper prev_pid=0 prev_prio=120 \
prev_state=R ==> next_comm=python next_pid=101 next_prio=120
python 101 12.8: 1 cycles:u: 7f1 g (/bin/x)
"""
Save = Callable[[str, str, bytes], None]


def write(save: Save, part: Callable[[bytes], bytes]) -> None:
    """Write all of them."""
    text = json.dumps(KINETO).encode()
    save("kineto", "object", text)
    save("kineto", "list", json.dumps(KINETO["traceEvents"]).encode())
    save("kineto", "compressed", gzip.compress(text, mtime=0))
    save("kineto", "cut", text[:700])
    save("perf_script", "switches", PERF.encode())
    _otlp(save)
    _chunks(save, part)
    rng = random.Random(16)
    for number in range(6):
        # Small numbers alone: at greater bytes the edges begin.
        small = bytes(rng.randrange(128) for _ in range(200 * (number + 1)))
        save("questions", str(number), bytes(it % 2 for it in small))
        save("stored", str(number), bytes((2, number)) + small)
        save("otlp_profiles", f"made-{number}", b"m" + small[: 60 * (number + 1)])
    _rings(save, part)
    offsets = struct.pack("<79Q", 0x030D0000, 0, *[8 * (it % 12) for it in range(77)])
    code = bytes(range(256)) * 4
    for version in range(6):
        head = bytes([version, 16]) + part(offsets) + b"\1\7"
        save("python_code", str(version), head + struct.pack("<8Q", *[64] * 8) + code)
    for minor in cpython_heap.STATE:
        made = cpython_heap.heap(minor, ("loader-1", "caf\xe9 \0"))
        save("python_threads", str(minor), bytes([minor - 10]) + made)


def _otlp(save: Save) -> None:
    message = profiles_pb2.ProfilesData()
    tables = message.dictionary
    tables.string_table.extend(["", "cpu", "nanoseconds", "main"])
    tables.function_table.add(name_strindex=3)
    tables.location_table.add().lines.add(function_index=0)
    tables.stack_table.add(location_indices=[0])
    profile = message.resource_profiles.add().scope_profiles.add().profiles.add(period=10**7)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    profile.samples.add(stack_index=0, values=[1, 2], timestamps_unix_nano=[10**18, 10**18 + 9])
    save("otlp_profiles", "binary", b"b" + message.SerializeToString())
    save("protobuf", "profiles", b"\xff" + message.SerializeToString())
    deep = b"\x0a\0"
    for _ in range(40):
        deep = b"\x0a" + bytes([len(deep)]) + deep
    fields = (
        b"\x22\3abc",
        b"\x28\1",
        b"\x32\3\1\x80\1",
        b"\x3a\x08" + bytes(8),
        b"\x8a\1\4\1\2\3\4",
    )
    save("protobuf", "fields", b"\xff" + b"".join(fields) + b"\x12\4\x0a\2\x22\0\x2d\0\0\0\0")
    save("protobuf", "deep", b"\x08" + deep)
    from google.protobuf import json_format

    save("otlp_profiles", "json", b"j" + json_format.MessageToJson(message).encode())


def _chunks(save: Save, part: Callable[[bytes], bytes]) -> None:
    rows = {"event": [{"time_ns": 1, "kind": "loss", "value": 2.0}], "metric": [{"series": "a"}]}
    tables = {name: captures.filled(name, content) for name, content in rows.items()}
    whole = captures.chunk(tables, **captures.meta())
    save("chunks", "sound", b"\0" + whole + captures.chunk(tables, **captures.meta(1, last=True)))
    save("chunks", "damaged", b"\1" + whole[:100] + b"SCHK" + whole)
    payload, listed = b"", []
    for name, table in tables.items():
        stream = captures.arrow_stream(table)
        listed.append({"name": name, "offset": len(payload), "length": len(stream)})
        payload += stream
    meta = json.dumps({**captures.meta(), "raw_len": len(payload), "tables": listed}).encode()
    save("chunks", "content", b"\2" + part(meta) + part(payload))


def _rings(save: Save, part: Callable[[bytes], bytes]) -> None:
    names = bytes(8) + abi.NAME.pack(4, 0) + b"gemm" + bytes(20)
    state = abi.STATE.pack(*[1] * len(abi.State._fields))
    now = 1_000_000_000_000
    records = b""
    for kind in (6, 1, 3, 2, 7, 4, 5):
        values = dict.fromkeys(abi.Record._fields, 1)
        values |= {"type": kind, "name": 8, "start_ns": now - 9, "end_ns": now, "weight": 1.0}
        if kind == 6:
            values |= {"source": 0}
        records += abi.RECORD.pack(*(values[it] for it in abi.Record._fields))
    head = bytes([0, 7, 255])
    save("ring", "runs", head + part(state) + part(names) + records)
    save("ring", "wrong", bytes([140, 20, 85]) + part(b"") + part(names) + records[::-1])
