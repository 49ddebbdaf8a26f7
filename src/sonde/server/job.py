# SPDX-License-Identifier: Apache-2.0
"""What a job did with its GPUs: hours held and wasted, why, and its functions; the owner table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sonde.errors import CaptureError, UsageError
from sonde.model.causes import Cause
from sonde.query import stored, stored_objects
from sonde.query.selection import Selection
from sonde.query.stored_session import QueryTimedOutError, StoredSession
from sonde.query.stored_use import (
    OWNERS,
    PARTS,
    by_node,
    by_owner,
    of_owner,
    processes_of,
    slot_ns,
)
from sonde.server import job_ranks, timeline_answers

VERDICTS = 3
"""Nodes whose stalls are explained: those with most stalled time."""
WINDOW_NS = 60 * 10**9
"""What is explained of each: its minute with most stalled time."""
MAX_FUNCTIONS = 50
MAX_NODES = 1_000
"""Nodes that are listed."""
_PID = re.compile(r"\((\d{1,10})\)$")
"""Of a verdict's `device_name`, where that is a process: 'python3 (4121)'."""
_HOUR_NS = 3_600e9
_NO_CAUSE = "stalled: the cause is not known"
NOT_COVERED = (
    "checkpoints and restarts: neither is recognized, so their time is productive, stalled or idle",
    "GPUs that were allocated and in which no process had memory: the scheduler is not asked",
    "productive is time in which kernels ran, however well they used the GPU: to wait within a"
    " collective counts",
)
"""What the hours of every answer leave out, for people."""


Explained = dict[str, tuple[int, int, dict[str, Any] | None]]
"""By node: start and end of its explained minute, ns since 1970, and the verdict, if any."""


def owners(session: StoredSession, selection: Selection, by: str, limit: int) -> dict[str, Any]:
    """The owner table: GPU hours by owner, most wasted first. With `selection.owners` only of the
    processes of those owners, for instance the jobs of one user. Raises CaptureError."""
    found = by_owner(session, selection, by, limit)
    rows = list(stored_objects.rows(found, session.check))
    every = rows[0]["owners"] if rows else 0
    return {
        "by": by,
        "slot_s": slot_ns(session, selection) / 1e9,
        "owners": [
            {"owner": row["owner"] or "", "nodes": row["nodes"], "gpus": row["devices"]}
            | _hours(row)
            for row in rows
        ],
        "left_out": every - len(rows),
        "not_covered": [*NOT_COVERED],
    }


def holders(
    session: StoredSession, selection: Selection, by: str, limit: int
) -> list[dict[str, Any]]:
    """GPU hours by node and owner, most wasted first. Raises CaptureError."""
    return [
        {"node": row["node"], "owner": row["owner"] or "", "gpus": row["devices"]} | _hours(row)
        for row in stored_objects.rows(by_node(session, selection, by, limit), session.check)
    ]


def job(session: StoredSession, selection: Selection, limit: int) -> dict[str, Any]:
    """One owner, named by exactly one of job, pod, container, unit, user, ….

    Its GPU hours, wasted ones by cause (they add up to `wasted_h`), verdicts, and functions by own
    time; `waiting`: which rank the others wait for; `not_covered`: also how many nodes are not
    listed, or not explained. Raises UsageError, CaptureError.
    """
    owners_given = dict(selection.owners or {})
    if len(owners_given) != 1:
        raise UsageError("this question is about one owner", f"give one of {', '.join(OWNERS)}")
    ((by, owner),) = owners_given.items()
    every = replace(selection, owners=None)
    found = of_owner(session, every, by, owner)
    slots = list(stored_objects.rows(found, session.check))
    pids: dict[str, set[int]] = defaultdict(set)
    for row in stored_objects.rows(processes_of(session, every, by, owner), session.check):
        pids[row["node"]].add(row["pid"])
    total = {name: sum(row[name] for row in slots) for name in ("held", *PARTS)}
    joules = [row["joules"] for row in slots if row["joules"] is not None]
    total["joules"] = sum(joules) if joules else None
    explained = _explained(session, every, slots, pids)
    nodes = sorted({row["node"] for row in slots} | set(pids))
    functions = stored.top_functions(session, selection, min(limit, MAX_FUNCTIONS)).to_pylist()
    return {
        "by": by,
        "id": owner,
        "slot_s": slot_ns(session, every) / 1e9,
        "nodes": nodes[:MAX_NODES],
        "gpus": len({(row["node"], one) for row in slots for one in row["devices"]}),
        **_hours(total),
        "wasted": _causes(slots, explained, total["idle"]),
        "verdicts": [
            {"node": node, "start_ns": start, "end_ns": end, "verdict": verdict}
            for node, (start, end, verdict) in explained.items()
            if verdict is not None
        ],
        "functions": functions,
        "waiting": _waiting(session, selection),
        "not_covered": [*NOT_COVERED, *_left_out(nodes, slots, explained)],
    }


def _left_out(
    nodes: Sequence[str], slots: Sequence[Mapping[str, Any]], explained: Explained
) -> Iterator[str]:
    """What the bounds on an answer's size and work leave out of it."""
    if len(nodes) > MAX_NODES:
        yield f"{len(nodes) - MAX_NODES:,} more nodes of it, which are not listed"
    stalled = {row["node"] for row in slots if row["stalled"]} - set(explained)
    if stalled:
        yield (
            f"causes of stalls on {len(stalled):,} more nodes: only the {VERDICTS} with most of "
            "them are explained"
        )


def _waiting(session: StoredSession, selection: Selection) -> dict[str, Any]:
    """As `job_ranks.waiting`. Where ranks cannot be compared, the rest of the answer is given all
    the same."""
    try:
        return job_ranks.waiting(session, selection)
    except QueryTimedOutError:
        raise
    except CaptureError as error:
        return job_ranks.not_known(selection, str(error))


def _hours(row: Mapping[str, Any]) -> dict[str, float | None]:
    """A row's times in hours, and `joules`: null where the power of its devices is not known."""
    hours = {f"{name}_h": (row[name] or 0) / _HOUR_NS for name in ("held", *PARTS)}
    hours["wasted_h"] = hours["stalled_h"] + hours["idle_h"]
    return {**hours, "joules": row["joules"]}


def _explained(
    session: StoredSession,
    selection: Selection,
    slots: Sequence[Mapping[str, Any]],
    pids: Mapping[str, set[int]],
) -> Explained:
    """The verdicts on the nodes with most stalled time."""
    stalled: dict[str, float] = defaultdict(float)
    minutes: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    first: dict[str, int] = {}
    for row in slots:  # in the order of time: minutes are counted from a node's first slot on
        since = row["slot"] - first.setdefault(row["node"], row["slot"])
        stalled[row["node"]] += row["stalled"]
        minutes[row["node"]][since // WINDOW_NS] += row["stalled"]
    found: Explained = {}
    for node in sorted(stalled, key=lambda one: (-stalled[one], one))[:VERDICTS]:
        if not stalled[node]:
            continue
        worst = max(minutes[node], key=lambda one: minutes[node][one])
        # What was recorded with the first poll begins up to a second before it.
        start = max(selection.start_ns, first[node] + worst * WINDOW_NS - 10**9)
        end = min(start + WINDOW_NS, selection.end_ns)
        one = replace(selection, start_ns=start, end_ns=end, nodes=[node])
        try:
            verdicts = timeline_answers.explained(session, one)["verdicts"]
        except QueryTimedOutError:
            raise
        except CaptureError:
            verdicts = []
        found[node] = start, end, _verdict_on(verdicts, pids.get(node, set()))
    return found


def _verdict_on(verdicts: Sequence[dict[str, Any]], pids: set[int]) -> dict[str, Any] | None:
    """The verdict on one of the processes; else the first on a device; else None."""
    for one in verdicts:
        pid = _PID.search(one["device_name"])
        if pid and int(pid[1]) in pids:
            return one
    return next((one for one in verdicts if one["device"] >= 0), None)


def _causes(
    slots: Sequence[Mapping[str, Any]], explained: Explained, idle: float
) -> list[dict[str, Any]]:
    """Wasted hours by cause, most first. A node's stalled time is split by the shares in the
    verdict on its explained minute."""
    ns: dict[str, float] = defaultdict(float)
    ns["idle: the process neither used nor called the GPU"] = idle
    for row in slots:
        _, _, verdict = explained.get(row["node"], (0, 0, None))
        causes = [one for one in verdict["causes"] if one["share"] > 0] if verdict else []
        shares = sum(one["share"] for one in causes)
        if not shares:
            ns[_NO_CAUSE] += row["stalled"]
        for one in causes if shares else ():
            is_known = one["key"] != Cause.UNKNOWN
            name = f"stalled: {one['title']}" if is_known else _NO_CAUSE
            ns[name] += row["stalled"] * one["share"] / shares
    listed = [{"cause": name, "gpu_h": one / _HOUR_NS} for name, one in ns.items() if one > 0]
    return sorted(listed, key=lambda one: (-one["gpu_h"], one["cause"]))
