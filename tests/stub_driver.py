# SPDX-License-Identifier: Apache-2.0
"""Programs on a stub of the CUDA driver, with the library in them: built, started, watched."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sonde.collect import inject_abi as abi
from sonde.collect.collector import Batch
from sonde.collect.device_time import DeviceTime
from sonde.collect.inject_memory import InjectMemory

PROGRAMS = Path(__file__).parent / "programs/inject"
REQUEST = f"{int(abi.Request.EVENTS | abi.Request.STACKS)}:1000"
NAMES = ("launches", "contexts", "traced", "cancel")
WITH_CUPTI = ("traced", "steady")


def build(where: Path, *flags: str, names: Sequence[str] = NAMES) -> Path:
    """The folder, with the stub driver and the programs in it, compiled with `flags`."""
    common = ("cc", "-O1", "-g", "-pthread", *flags)
    stub = where / "libcuda.so.1"
    subprocess.run(
        [*common, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub,
         PROGRAMS / "stub_cuda.c"],
        check=True,
    )  # fmt: skip
    cupti = where / "libcupti.so.13"
    subprocess.run(
        [*common, "-shared", "-fPIC", "-Wl,-soname,libcupti.so.13", "-o", cupti,
         PROGRAMS / "stub_cupti.c", stub],
        check=True,
    )  # fmt: skip
    for name in names:
        stubs = (cupti, stub) if name in WITH_CUPTI else (stub,)
        subprocess.run(
            [*common, "-o", where / name, PROGRAMS / f"{name}.c", *stubs, f"-Wl,-rpath,{where}"],
            check=True,
        )
    return where


def start(
    program: str | Path, library: Path, *words: object, request: str = REQUEST
) -> subprocess.Popen[str]:
    environment = {**os.environ, "LD_PRELOAD": str(library), "SONDE_INJECT": request}
    return subprocess.Popen(
        [program, *map(str, words)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def find(pid: int) -> InjectMemory:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        memory = InjectMemory.find(pid)
        if memory:
            return memory
        time.sleep(0.02)
    raise AssertionError("the library made no memory")


def _add(rows: dict[str, list[Any]], batch: Batch) -> None:
    for table, new in batch.rows.items():
        assert isinstance(new, list)
        rows[table] += new


def watch(process: subprocess.Popen[str], collector: DeviceTime) -> dict[str, list[Any]]:
    """Drain a collector until the process ends; rows by table. Forked children stay until found."""
    rows: dict[str, list[Any]] = defaultdict(list)
    since = time.monotonic_ns()
    found = {process.pid}
    while process.poll() is None:
        time.sleep(0.1)
        for child in collector._processes.keys() - found if process.stdin else ():
            found.add(child)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has just ended
                process.stdin.write("\n")
                process.stdin.flush()
        batch = collector.drain(since, False)
        _add(rows, batch)
        rows["metric"] += batch.metrics
    _add(rows, collector.drain(since, True))
    collector.stop()
    return rows
