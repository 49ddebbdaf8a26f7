# SPDX-License-Identifier: Apache-2.0
"""GPU hours of owners: parts that add up, equal to a recount of the polled metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.errors import CaptureError, CaptureTooLarge, UsageError
from sonde.query import framing
from sonde.query.selection import Selection
from sonde.query.stored_use import by_owner, of_owner, slot_ns
from sonde.server import answers, job
from sonde.server.parameters import parse
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope
from sonde.store.flush import Flusher

DATA = Path(__file__).parents[1] / "data"
CAPTURES = (
    *(DATA / "explain" / "own" / f"{name}.sonde" for name in ("cpu_quota", "jax_float")),
    *(DATA / f"{name}.sonde" for name in ("h200_input_pipeline", "h200_tenants", "h200_training")),
)
ME = Caller("test", "default", frozenset(Scope))
HOUR_NS = 3_600e9


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("store")
    service = Service(folder, open_tenant="default", flushes=False)
    for path in CAPTURES:
        content = path.read_bytes()
        at = framing.FILE_HEADER.size
        for chunk in framing.chunks(BytesIO(content), len(content)):
            assert isinstance(chunk, framing.RawChunk)
            for future, _ in service.take(ME, path.stem, content[at : chunk.end]):
                future.result(10)
            at = chunk.end
    service.wal.close()
    Flusher(folder, service.catalog).flush()
    yield service
    service.children.close()
    service.catalog.close()
    service.tokens.close()


def range_of(service: Service, node: str) -> tuple[int, int]:
    session = service.session(ME, Selection(0, 1 << 62))
    rows = session.arrow(
        "SELECT min(start_ns) AS a, max(end_ns) AS b FROM chunk WHERE node = ?", [node]
    ).to_pylist()
    session.close()
    return rows[0]["a"], rows[0]["b"]


def ask(service: Service, question: str, node: str, **given: str) -> Any:
    start, end = range_of(service, node)
    times = {"from": f"{start / 1e9:.9f}", "to": f"{end / 1e9:.9f}", "node": node}
    options = parse(list((times | given).items()))
    answer = answers.ask(service, ME, answers.QUESTIONS[question], options)
    return json.loads(answer.content)


def recounted(service: Service, node: str, by: str) -> dict[str, dict[str, float]]:
    """By owner, in hours: held and productive, from the rows of `metric` one by one."""
    start, end = range_of(service, node)
    start, end = round(float(f"{start / 1e9:.9f}") * 1e9), round(float(f"{end / 1e9:.9f}") * 1e9)
    wanted = Selection(start, end, nodes=[node])
    session = service.session(ME, wanted)
    clause, parameters = wanted.sql(kind=False, process=False)
    rows = session.arrow(
        f"SELECT time_ns, series, labels, value FROM metric {clause}", parameters
    ).to_pylist()
    step = slot_ns(session, wanted)
    names = session.arrow(f'SELECT pid, "{by}" AS owner FROM process WHERE node = ?', [node])
    session.close()
    owner_of = {row["pid"]: row["owner"] for row in names.to_pylist()}
    looks: dict[Any, set[int]] = defaultdict(set)
    used: dict[Any, float] = defaultdict(float)
    for row in rows:
        labels = json.loads(row["labels"] or "{}")
        if "process.pid" not in labels:
            continue
        key = row["time_ns"] // step, labels["hw.id"], int(labels["process.pid"])
        if row["series"] == "sonde.process.gpu.memory" and row["value"] > 0:
            looks[key].add(row["time_ns"])
        elif row["series"] == "sonde.process.gpu.utilization":
            used[key] += row["value"] * (labels["sonde.gpu.engine"] == "sm")
    # All processes of a node are polled at the same times.
    times = sorted({time for found in looks.values() for time in found})
    every = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    slots: dict[Any, dict[str, Any]] = defaultdict(lambda: defaultdict(lambda: [set(), 0.0]))
    for (slot, device, pid), found_at in looks.items():
        holder = slots[slot, device][owner_of.get(pid, "")]
        holder[0] |= found_at
        holder[1] += min(float(len(found_at)), used[slot, device, pid])
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for holders in slots.values():
        polls = len(set().union(*(at for at, _ in holders.values())))
        parts = {owner: part / polls for owner, (_, part) in holders.items()}
        whole = max(1.0, sum(parts.values()))
        unused = 1 - sum(parts.values()) / whole
        alike = sum(len(at) for at, _ in holders.values())
        for owner, (at, _) in holders.items():
            hours = polls * every / HOUR_NS
            found[owner]["productive_h"] += hours * parts[owner] / whole
            found[owner]["held_h"] += hours * (parts[owner] / whole + unused * len(at) / alike)
    return found


@pytest.mark.parametrize("node", [path.stem for path in CAPTURES])
@pytest.mark.parametrize("by", ["user", "comm"])
def test_the_parts_of_every_owner_add_up_and_equal_a_recount(
    service: Service, node: str, by: str
) -> None:
    found = ask(service, "owners", node, by=by)
    expected = recounted(service, node, by)

    assert {one["owner"] for one in found["owners"]} == set(expected)
    for one in found["owners"]:
        parts = one["productive_h"] + one["stalled_h"] + one["idle_h"] + one["unknown_h"]
        assert one["held_h"] == pytest.approx(parts)
        assert one["wasted_h"] == pytest.approx(one["stalled_h"] + one["idle_h"])
        for name, hours in expected[one["owner"]].items():
            # Where many slots have one poll, the median is of other pairs of polls.
            assert one[name] == pytest.approx(hours, rel=5e-3), name


@pytest.mark.parametrize("node", [path.stem for path in CAPTURES])
def test_hours_are_those_of_the_observed_time_in_any_time_that_contains_it(
    service: Service, node: str
) -> None:
    start, end = range_of(service, node)
    expected = {one["owner"]: one for one in ask(service, "owners", node, by="user")["owners"]}
    for length_s in (60, 3_600, 86_400, 7 * 86_400):
        # The recorded time is somewhere within, not at the begin of a slot.
        begin = end / 1e9 + 5.3 - length_s
        given = {"from": f"{begin:.9f}", "to": f"{end / 1e9 + 5.3:.9f}", "by": "user"}
        table = ask(service, "owners", node, **given)["owners"]
        nodes = ask(service, "holders", node, **given)["holders"]

        assert {one["owner"] for one in table} == set(expected)
        held_s = 3_600 * sum(one["held_h"] for one in table)
        assert held_s <= (end - start) / 1e9 + 1.0, length_s
        assert 3_600 * sum(one["held_h"] for one in nodes) == pytest.approx(held_s)
        for one in table:
            for name in ("held_h", "wasted_h", "productive_h", "stalled_h", "idle_h"):
                usual = expected[one["owner"]][name]
                assert 3_600 * one[name] == pytest.approx(3_600 * usual, abs=1.0), length_s
            if one["joules"] is not None:
                assert one["joules"] == pytest.approx(expected[one["owner"]]["joules"], rel=0.1)
        if table:
            found = ask(service, "job", node, user=table[0]["owner"], **given)
            assert found["held_h"] == pytest.approx(table[0]["held_h"])
            # The minute that is explained is one that was recorded.
            assert all(start - 2e9 <= one["start_ns"] < end for one in found["verdicts"])


def test_a_long_slot_counts_for_its_polls_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that was polled all week has long slots, and some jobs that ran for seconds."""
    expected = {
        node: ask(service, "owners", node, by="user")["owners"]
        for node in ("cpu_quota", "h200_tenants")
    }
    monkeypatch.setattr("sonde.query.stored_use.slot_ns", lambda *_: 336 * 10**9)
    for node, table in expected.items():
        found = {one["owner"]: one for one in ask(service, "owners", node, by="user")["owners"]}
        for one in table:
            for name in ("held_h", "productive_h", "wasted_h"):
                assert 3_600 * found[one["owner"]][name] == pytest.approx(
                    3_600 * one[name], abs=1.0
                )


def test_a_shared_device_counts_once(service: Service) -> None:
    found = ask(service, "owners", "cpu_quota")
    held_s = 3_600 * sum(one["held_h"] for one in found["owners"])

    assert len(found["owners"]) == 2
    assert 10 <= held_s <= 14  # recorded for 12.1 s, with four processes on one device


def test_waste_of_a_job_is_explained_and_adds_up(service: Service) -> None:
    found = ask(service, "job", "cpu_quota", user="root")
    table = {one["owner"]: one for one in ask(service, "owners", "cpu_quota")["owners"]}

    assert found["nodes"] == ["cpu_quota"] and found["gpus"] == 1
    assert found["held_h"] == pytest.approx(table["root"]["held_h"])
    causes = {one["cause"]: one["gpu_h"] for one in found["wasted"]}
    assert sum(causes.values()) == pytest.approx(found["wasted_h"]) and found["wasted_h"] > 0
    assert max(causes, key=lambda it: causes[it]).startswith("stalled: run queue")
    assert found["verdicts"][0]["verdict"]["bounds"][0]["key"] == "cpu contention"
    assert found["functions"][0]["own_ns"] > 0


def test_what_held_without_work_is_idle(service: Service) -> None:
    found = ask(service, "job", "cpu_quota", user="")

    assert found["productive_h"] == found["stalled_h"] == 0
    assert found["idle_h"] == pytest.approx(found["held_h"]) == pytest.approx(found["wasted_h"])
    assert [one["cause"][:5] for one in found["wasted"]] == ["idle:"]


def test_a_job_without_a_gpu_has_no_hours(service: Service) -> None:
    found = ask(service, "job", "h200_training", comm="python3")
    nobody = ask(service, "job", "h200_training", job="' OR 1 = 1 --")

    assert (found["held_h"], found["gpus"], found["wasted"]) == (0, 0, [])
    assert found["nodes"] == ["h200_training"] and found["functions"]
    assert nobody["nodes"] == nobody["functions"] == []


@pytest.mark.parametrize("given", [{}, {"user": "root", "comm": "python3"}])
def test_exactly_one_owner_is_asked_about(service: Service, given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="about one owner"):
        ask(service, "job", "cpu_quota", **given)


def test_an_unknown_kind_of_owner_is_refused(service: Service) -> None:
    with pytest.raises(CaptureError, match="no owner is called 'pid'"):
        ask(service, "owners", "cpu_quota", by="pid")


def test_stalls_without_a_verdict_have_no_known_cause() -> None:
    slots = [{"node": "a", "stalled": 3.6e12}, {"node": "b", "stalled": 7.2e12}]
    causes = [
        {"key": "input", "title": "input", "share": 0.6},
        {"key": "host", "title": "host", "share": 0.2},
    ]
    found = job._causes(slots, {"a": (0, 1, {"causes": causes})}, 3.6e12)

    assert [(one["cause"].split(":")[1].strip()[:12], round(one["gpu_h"], 6)) for one in found] == [
        ("the cause is", 2.0), ("the process ", 1.0), ("input", 0.75), ("host", 0.25),
    ]  # fmt: skip


def test_what_a_verdict_does_not_know_is_one_cause_with_what_has_no_verdict() -> None:
    slots = [{"node": "a", "stalled": 3.6e12}, {"node": "b", "stalled": 3.6e12}]
    causes = [{"key": "unknown", "title": "unknown", "share": 0.5}]
    found = job._causes(slots, {"a": (0, 1, {"causes": causes})}, 0)

    assert found == [{"cause": "stalled: the cause is not known", "gpu_h": pytest.approx(2.0)}]


def test_an_answer_names_what_its_bounds_left_out() -> None:
    nodes = [f"n{number:04}" for number in range(job.MAX_NODES + 7)]
    slots = [{"node": node, "stalled": float(node < "n0005")} for node in nodes]

    assert list(job._left_out(nodes, slots, dict.fromkeys(nodes[:3], (0, 1, None)))) == [
        "7 more nodes of it, which are not listed",
        "causes of stalls on 2 more nodes: only the 3 with most of them are explained",
    ]
    assert list(job._left_out(nodes[:3], slots[:3], dict.fromkeys(nodes, (0, 1, None)))) == []


def test_an_owner_with_too_many_rows_is_refused_and_not_summed_in_part(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Selection(*range_of(service, "h200_tenants"))
    session = service.session(ME, wanted)
    try:
        (owner, *_) = (row["owner"] for row in by_owner(session, wanted, "comm").to_pylist())
        found = of_owner(session, wanted, "comm", owner)
        assert found.num_rows > 1
        monkeypatch.setattr("sonde.query.stored_use.MAX_OF_OWNER", found.num_rows - 1)
        with pytest.raises(CaptureTooLarge, match="choose a shorter time"):
            of_owner(session, wanted, "comm", owner)
    finally:
        session.close()
