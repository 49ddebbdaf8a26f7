# SPDX-License-Identifier: Apache-2.0
"""Rows of the table device_run, from the records of the library."""

from __future__ import annotations

from typing import Final

from sonde.collect import inject_abi as abi
from sonde.collect.collector import ProcessKey
from sonde.collect.inject_records import Run
from sonde.model.rows import DeviceRunRow

_KINDS: Final = {
    abi.Type.KERNEL: "kernel",
    abi.Type.REPLAY: "replay",
    abi.Type.COPY: "copy",
    abi.Type.SET: "set",
    abi.Type.SYNC: "sync",
}
_SOURCES: Final[dict[int, str]] = {
    abi.Source.BY_EVENT: "event",
    abi.Source.BY_OPENCL: "opencl",
    abi.Source.BY_HOST: "host",
}


def row_of(run: Run, key: ProcessKey, tid: int, stack_id: int, stream: int) -> DeviceRunRow:
    """A run as a row; `stream`: its number (DeviceProcess.stream)."""
    kind = _KINDS[run.type]
    source = _SOURCES.get(run.source, "unknown")
    pid, start_ns = key
    return DeviceRunRow(
        run.start_ns,
        run.end_ns,
        kind,
        run.name or name_of(run),
        source,
        pid,
        start_ns,
        tid,
        stack_id,
        run.correlation,
        run.weight,
        run.window,
        run.device,
        stream,
        run.direction,
        run.bytes,
        _triple(run.grid),
        _triple(run.block),
        run.shared_bytes,
        run.registers,
    )


def name_of(run: Run) -> str:
    """A run's name, or its kind in parentheses where it has none."""
    kind = _KINDS[run.type]
    if run.name:
        return run.name
    if kind == "replay":
        return "(graph)"
    if kind == "copy":
        return f"(copy {run.direction})"
    return f"({kind})"


def _triple(of: tuple[int, int, int]) -> str:
    return f"{of[0]},{of[1]},{of[2]}" if any(of) else ""
