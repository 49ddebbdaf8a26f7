# SPDX-License-Identifier: Apache-2.0
"""GPU hours where jobs share devices, or a driver does not report who uses them: polled rows whose
truth is known, through the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sonde import _native
from sonde.query.selection import Selection
from sonde.query.stored_session import StoredSession
from sonde.server import job
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope
from sonde.sinks.chunk import ChunkBuilder, columns_of
from sonde.store.flush import Flusher

BEGIN_NS = 1_800_000_000 * 10**9
LENGTH_S = 100
ME = Caller("test", "default", frozenset(Scope))
WANTED = Selection(BEGIN_NS, BEGIN_NS + LENGTH_S * 10**9)
MEMORY, USED, BUSY = (
    *("sonde.process.gpu.memory", "sonde.process.gpu.utilization"), "hw.gpu.utilization",
)  # fmt: skip


def metric(second: float, series: str, value: float, **labels: str) -> tuple[Any, ...]:
    return BEGIN_NS + round(second * 1e9), series, json.dumps(labels, separators=(",", ":")), value


def of(pid: int, device: str = "GPU-1", **more: str) -> dict[str, str]:
    return {"hw.id": device, "process.pid": str(pid), "sonde.process.start": "1", **more}


def table(folder: Path, rows: list[tuple[Any, ...]], jobs: dict[int, str]) -> dict[str, Any]:
    """The owner table by job of one node with these rows of `metric`: seconds."""
    with asked(folder, rows, jobs) as session:
        found = job.owners(session, WANTED, "job", 50)
    return {
        one["owner"]: {
            name.removesuffix("_h"): pytest.approx(3_600 * hours, abs=1e-6)
            for name, hours in one.items()
            if name.endswith("_h")
        }
        for one in found["owners"]
    }


@contextmanager
def asked(
    folder: Path,
    rows: list[tuple[Any, ...]],
    jobs: dict[int, str],
    users: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[StoredSession]:
    """A store with these rows of `metric` of one node, and processes of these jobs and users."""
    builder = ChunkBuilder(BEGIN_NS)
    builder.add("metric", rows)
    names = columns_of("process")
    numbers = {"pid", "start_ns", "ppid", "inner_pid"}
    for pid, name in jobs.items():
        row = dict.fromkeys(names, "") | dict.fromkeys(numbers, 0)
        row |= {"pid": pid, "start_ns": 1, "job": name, "user": users.get(pid, "")}
        builder.add("process", [tuple(row[name] for name in names)])
    meta = {
        "seq": 0, "start_ns": BEGIN_NS, "end_ns": BEGIN_NS + LENGTH_S * 10**9, "last": True,
        "wall_offset_ns": 0, "paused_ns": 0,
        "capture": {"id": "c", "version": _native.VERSION, "host": {}},
    }  # fmt: skip
    service = Service(folder, open_tenant="default", flushes=False)
    for future, _ in service.take(ME, "node", builder.encode(meta)):
        future.result(10)
    service.wal.close()
    Flusher(folder, service.catalog).flush()
    session = service.session(ME, WANTED)
    yield session
    session.close()
    service.catalog.close()
    service.tokens.close()


def parts(held: float, productive: float, stalled: float, idle: float, unknown: float = 0) -> Any:
    found = {"held": held, "productive": productive, "stalled": stalled, "idle": idle}
    return found | {"unknown": unknown, "wasted": stalled + idle}


def test_what_nobody_used_of_a_shared_device_is_split(tmp_path: Path) -> None:
    rows = []
    for second in range(100):
        rows += [metric(second + 0.5, MEMORY, 1e9, **of(pid)) for pid in (1, 2)]
        if second < 50:
            more = {"sonde.gpu.engine": "sm"}
            rows.append(metric(second + 0.5, USED, 0.6, **of(1, **more)))
            rows.append(metric(second + 0.5, USED, 1.0, **of(1, **{"sonde.gpu.engine": "memory"})))
    found = table(tmp_path, rows, {1: "4711", 2: "4712"})

    # For 50 s one used 60 %, and each has half of the other 40 %; then each has half of all.
    assert found["4711"] == parts(held=65, productive=30, stalled=10, idle=25)
    assert found["4712"] == parts(held=35, productive=0, stalled=0, idle=35)


def test_two_devices_of_a_job_count_twice_and_its_processes_once(tmp_path: Path) -> None:
    holding = [of(1), of(2), of(1, "GPU-2")]
    rows = [metric(s + 0.5, MEMORY, 1e9, **labels) for s in range(40) for labels in holding]
    rows += [metric(s + 0.5, USED, 0.7, **of(pid, **{"sonde.gpu.engine": "sm"}))
             for s in range(40) for pid in (1, 2)]  # fmt: skip
    rows += [metric(s + 0.5, BUSY, 0.0, **{"hw.id": "GPU-2", "hw.gpu.task": "general"})
             for s in range(40)]  # fmt: skip
    found = table(tmp_path, rows, {1: "4711", 2: "4711"})

    # 1.4 of a device is all of it.
    assert found == {"4711": parts(held=80, productive=40, stalled=0, idle=40)}


def test_use_that_is_not_known_by_process(tmp_path: Path) -> None:
    busy = {"hw.gpu.task": "general"}
    rows = []
    for second in range(20):
        at = second + 0.5
        rows.append(metric(at, MEMORY, 1e9, **of(1, "alone")))
        rows.append(metric(at, BUSY, 0.25, **{"hw.id": "alone"}, **busy))
        rows += [metric(at, MEMORY, 1e9, **of(pid, "shared")) for pid in (1, 2)]
        rows.append(metric(at, BUSY, 0.0 if second < 10 else 0.9, **{"hw.id": "shared"}, **busy))
        rows.append(metric(at, MEMORY, 1e9, **of(3, "dark")))
    found = table(tmp_path, rows, {1: "a", 2: "b", 3: "c"})

    assert found["a"] == parts(held=30, productive=5, stalled=15, idle=5, unknown=5)
    assert found["b"] == parts(held=10, productive=0, stalled=0, idle=5, unknown=5)
    assert found["c"] == parts(held=20, productive=0, stalled=0, idle=0, unknown=20)


def test_hostile_labels_are_nobody_and_nothing_is_made_of_them(tmp_path: Path) -> None:
    rows = [metric(s + 0.5, MEMORY, 1e9, **of(1)) for s in range(10)]
    odd = ('{"hw.id":"GPU-1"', "", "null", '{"hw.id":"GPU-1","process.pid":"' + "9" * 400 + '"}')
    rows += [(BEGIN_NS + 1, MEMORY, text, 1e9) for text in odd]
    rows += [metric(0.5, MEMORY, -5.0, **of(7)), metric(0.5, MEMORY, float("nan"), **of(8))]
    rows += [metric(s + 0.5, USED, value, **of(1, **{"sonde.gpu.engine": "sm"}))
             for s, value in enumerate((float("inf"), -3.0, 1e300, 0.5))]  # fmt: skip
    found = table(tmp_path, rows, {1: "'; DROP TABLE process; --", 9: "4711"})

    assert sum(one["held"].expected for one in found.values()) <= 14
    for one in found.values():
        every = sum(one[name].expected for name in ("productive", "stalled", "idle", "unknown"))
        assert one["held"] == every and every == every


def test_the_jobs_of_one_user_and_who_holds_which_node(tmp_path: Path) -> None:
    rows = [
        metric(s + 0.5, MEMORY, 1e9, **of(pid, device))
        for s in range(20)
        for pid, device in ((1, "GPU-1"), (2, "GPU-2"), (3, "GPU-3"))
    ]
    jobs, users = {1: "a", 2: "b", 3: "c"}, {1: "ada", 2: "ada", 3: "bob"}
    with asked(tmp_path, rows, jobs, users) as session:
        of_ada = job.owners(session, replace(WANTED, owners={"user": "ada"}), "job", 50)
        nobody = job.owners(session, replace(WANTED, owners={"user": "' OR 1=1"}), "job", 50)
        holders = job.holders(session, WANTED, "user", 50)
        one = job.job(session, replace(WANTED, owners={"user": "bob"}), 5)
    assert {row["owner"] for row in of_ada["owners"]} == {"a", "b"}
    assert of_ada["left_out"] == 0
    assert nobody["owners"] == []
    assert [(row["node"], row["owner"], row["gpus"]) for row in holders] == [
        ("node", "ada", 2), ("node", "bob", 1),
    ]  # fmt: skip
    assert holders[0]["held_h"] == pytest.approx(2 * holders[1]["held_h"])
    assert one["gpus"] == 1 and one["joules"] is None


def test_energy_is_the_power_of_devices_for_the_time_held(tmp_path: Path) -> None:
    rows = []
    for second in range(20):
        at = second + 0.5
        rows += [metric(at, MEMORY, 1e9, **of(pid, "shared")) for pid in (1, 2)]
        rows.append(metric(at, "hw.power", 300.0, **{"hw.id": "shared"}))
        rows.append(metric(at, "hw.power", 900.0, **{"hw.id": "of nobody"}))
        rows.append(metric(at, MEMORY, 1e9, **of(3, "dark")))
        rows.append(metric(at, "hw.power", float("nan"), **{"hw.id": "dark"}))
    with asked(tmp_path, rows, {1: "a", 2: "b", 3: "c"}) as session:
        found = {
            one["owner"]: one["joules"] for one in job.owners(session, WANTED, "job", 9)["owners"]
        }
    assert found == {"a": pytest.approx(3_000), "b": pytest.approx(3_000), "c": None}
