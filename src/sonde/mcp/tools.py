# SPDX-License-Identifier: Apache-2.0
"""The tools: each asks the server one or two questions and gives a bounded answer.

Descriptions are read by a model: they state units, defaults and that names are not to be trusted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from sonde.mcp import troubles
from sonde.mcp.selection import Selection, observed
from sonde.mcp.untrusted import clean, fitting, fitting_lists, flame
from sonde.server.client import ServerClient

MAX_ROWS = 200
"""Most rows that a call may ask for."""
MAX_POINTS = 240
"""Likewise points of a series, and columns of a heat map of ranks."""

LEAST_SHARE, MAX_CAUSES = 0.005, 6
"""Causes of a verdict: those of at least this share of the time, and how many of them."""
MAX_PLACES, MAX_EVIDENCE, MAX_STEPS = 3, 12, 2
"""Places of code of a cause; lines of evidence and next steps of a verdict."""
MAX_INCIDENT_EVIDENCE = 6
"""Lines of the evidence for an incident's likeliest cause."""

Start = Annotated[
    str, Field(description="begin: now, -15m, -2h, ISO 8601 (UTC), or seconds since 1970")
]
End = Annotated[str, Field(description="end, exclusive: as the begin")]
Node = Annotated[str, Field(description="name of one node; empty: all", max_length=253)]
OneNode = Annotated[
    str,
    Field(description="name of one node, as `overview` has it", min_length=1, max_length=253),
]
Pid = Annotated[int, Field(description="one process; 0: all", ge=0, lt=1 << 32)]
Owner = Annotated[str, Field(description="exactly as recorded; empty: all", max_length=300)]
Rows = Annotated[int, Field(description="most rows of the answer", ge=1, le=MAX_ROWS)]
OneOwner = Annotated[
    str, Field(description="its number or name, exactly", min_length=1, max_length=300)
]
OwnerKind = Literal["job", "user", "pod", "namespace", "container", "unit"]
Kind = Annotated[
    Literal["cpu", "blocked", "runqueue", "device", "kernel", "mapped", "faulted"],
    Field(
        description="cpu: on a CPU; blocked: waiting; runqueue: ready without a CPU; device: host "
        "time in device calls; kernel: device time by launching code; mapped, faulted: host memory"
    ),
]


class Answer(TypedDict):
    """What every tool returns."""

    selection: dict[str, str]
    data: Any
    left_out: list[str]
    """Sentences on how many rows the bounds of the answer leave out."""
    evidence: dict[str, Any]
    """What the answer rests on: nodes, chunks, seconds recorded, events lost."""
    page: str
    """Address that shows the same to a person."""


class Tools:
    """The tools over one server. Each raises SondeError where it cannot answer."""

    def __init__(self, server: ServerClient, page: str = "") -> None:
        """`page`: address of the page for links; '' the server's."""
        self._server, self._page = server, page or server.url

    def overview(self, start: Start = "-1h", end: End = "now", limit: Rows = 50) -> Answer:
        """All nodes, those with problems first: problems found, share of GPU time used, seconds of
        CPU, of waits, of device work. Ask this first."""
        selection = Selection.of(start, end)
        found, more = self._asked("overview", selection, "nodes")
        devices: list[Any] = []
        if found:
            devices, of_devices = self._asked("devices", selection, "devices")
            more += of_devices
        rows = troubles.ranked(found, devices, min(time.time(), selection.to_s))
        data, cut = fitting(rows, limit, "nodes")
        return self._answer(selection, data, more + cut, selection.page_url(self._page, ""))

    def node_series(
        self,
        node: OneNode,
        metrics: Annotated[
            list[str],
            Field(
                description="names of metrics; empty: the answer lists those that there are",
                max_length=8,
            ),
        ] = [],  # noqa: B006
        start: Start = "-1h",
        end: End = "now",
        points: Annotated[int, Field(description="most points a series", ge=1, le=MAX_POINTS)] = 30,
    ) -> Answer:
        """Metrics of one node over time: mean, least and most of each step. Besides polled metrics
        (hw.gpu.utilization, hw.power, …) there are sonde.cpu (threads on CPU, blocked, ready),
        sonde.device.busy and sonde.device.launches, made of what was observed."""
        selection = Selection.of(start, end, node)
        page = selection.page_url(self._page, "node")
        if not metrics:
            found, more = self._asked("metrics", selection, "metrics")
            names, cut = fitting([row["series"] for row in found], MAX_ROWS, "metrics")
            return self._answer(selection, {"metrics": names}, more + cut, page)
        rows, more = self._asked("charts", selection, "series", series=metrics, points=points)
        lines: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            if row["series"] in metrics:
                key = row["series"], row["labels"]
                line = lines.setdefault(key, {"metric": key[0], "labels": key[1], "points": []})
                point = {
                    "s_after_begin": round(row["time_ns"] / 1e9 - selection.from_s, 3),
                    **{name: round(row[name], 6) for name in ("value", "least", "most")},
                }
                line["points"].append(point)
        data, cut = fitting(list(lines.values()), MAX_ROWS, "series")
        return self._answer(selection, data, more + cut, page)

    def processes(
        self, kind: Kind = "cpu", node: Node = "", start: Start = "-1h", end: End = "now",
        limit: Rows = 20,
    ) -> Answer:  # fmt: skip
        """Processes by time (or bytes) of a kind, with user, job, pod, container and unit."""
        selection = Selection.of(start, end, node)
        parameters = selection.parameters(kind=kind, limit=limit + 1)
        rows = [_seconds(row) for row in self._server.ask("processes", parameters)]
        data, cut = _counted(fitting(rows, limit, "processes"), len(rows) > limit)
        return self._answer(
            selection, data, cut, selection.page_url(self._page, "range", kind=kind)
        )

    def top_functions(
        self, kind: Kind = "cpu", node: Node = "", pid: Pid = 0, job: Owner = "", user: Owner = "",
        pod: Owner = "", start: Start = "-1h", end: End = "now", limit: Rows = 20,
    ) -> Answer:  # fmt: skip
        """Functions by their own time of a kind; total is with what they called."""
        selection = Selection.of(start, end, node, pid=pid, job=job, user=user, pod=pod)
        total_ns = self._server.ask("totals", selection.parameters(kind=kind))["ns"]
        parameters = selection.parameters(kind=kind, limit=limit + 1)
        rows = [
            {
                "function": row["function"] or "(no name)",
                "binary": row["binary"],
                "own_s": round(row["own_ns"] / 1e9, 4),
                "total_s": round(row["total_ns"] / 1e9, 4),
                "own_share": round(row["own_ns"] / total_ns, 4) if total_ns else 0.0,
            }
            for row in self._server.ask("top", parameters)
        ]
        data, cut = _counted(fitting(rows, limit, "functions"), len(rows) > limit)
        page = selection.page_url(self._page, "range", kind=kind, shape="table")
        return self._answer(selection, data, cut, page)

    def flame_graph(
        self, kind: Kind = "cpu", node: Node = "", pid: Pid = 0, job: Owner = "", user: Owner = "",
        pod: Owner = "", start: Start = "-1h", end: End = "now",
        boxes: Annotated[int, Field(description="most boxes", ge=10, le=400)] = 120,
    ) -> Answer:  # fmt: skip
        """Whole stacks as a nested flame graph: each box has `frames` (callers first; each calls
        only the next), `share` of all time, `self_share`, `children`."""
        selection = Selection.of(start, end, node, pid=pid, job=job, user=user, pod=pod)
        found = self._server.ask("flametree", selection.parameters(kind=kind))
        tree, cut = flame(found["root"], found["total"], boxes)
        data = clean({"unit": found["unit"], "total": found["total"]}) | {"root": tree}
        page = selection.page_url(self._page, "range", kind=kind)
        return self._answer(selection, data, cut, page)

    def why_waiting(self, node: OneNode, start: Start = "-2m", end: End = "now") -> Answer:
        """The verdict on one node: what its GPUs or the launching threads were bound by, the causes
        of waits with the code that waited, evidence, and one next step. A short range (10 s to
        5 min) is best: all its rows are read."""
        selection = Selection.of(start, end, node)
        found = self._server.ask("verdict", selection.parameters())
        verdicts, cut = fitting([_verdict(one) for one in found["verdicts"]], 16, "verdicts")
        notes, more = fitting(found["notes"], 10, "notes")
        cut += more
        data = {"verdicts": verdicts, "notes": notes}
        return self._answer(selection, data, cut, selection.page_url(self._page, "range"))

    def kernels(
        self, node: Node = "", start: Start = "-1h", end: End = "now", limit: Rows = 20
    ) -> Answer:
        """Work on devices (kernels, copies, replayed graphs) by device time; `timed` runs were
        measured, `runs` is estimated from them."""
        selection = Selection.of(start, end, node)
        parameters = selection.parameters(limit=limit + 1)
        rows = [_seconds(row) for row in self._server.ask("kernels", parameters)]
        data, cut = _counted(fitting(rows, limit, "kernels"), len(rows) > limit)
        return self._answer(
            selection, data, cut, selection.page_url(self._page, "range", shape="kernels")
        )

    def ranks(
        self, node: Node = "", job: Owner = "", start: Start = "-10m", end: End = "now",
        limit: Rows = 64,
    ) -> Answer:  # fmt: skip
        """Processes on devices (ranks of jobs), those with most work first: a
        straggler works longer and waits less in collectives than the others."""
        selection = Selection.of(start, end, node, job=job)
        found = self._server.ask("ranks", selection.parameters(points=MAX_POINTS))
        rows = _ranks(found)
        data, cut = fitting(rows, limit, "ranks")
        if found["left_out"]:
            cut.append(f"{found['left_out']:,} ranks with less device time are not in the figures")
        return self._answer(selection, data, cut, selection.page_url(self._page, "ranks"))

    def incidents(
        self, node: Node = "", start: Start = "-1d", end: End = "now", limit: Rows = 20
    ) -> Answer:
        """What became slower, why, and who did it, as `sonde diagnose` found it, newest first."""
        selection = Selection.of(start, end, node)
        found = self._server.ask("incidents")
        rows = [
            _incident(one)
            for one in found["incidents"]
            if selection.from_s <= one["noticed_ns"] / 1e9 < selection.to_s
            and node in ("", one["node"])
        ]
        data, cut = fitting(rows, limit, "incidents")
        for name in ("older", "unreadable"):
            if found[name]:
                cut.append(f"{found[name]:,} {name} incidents are not read")
        if not found["shown"]:
            cut.append("this server keeps no incidents: start it with --incidents")
        return self._answer(selection, data, cut, selection.page_url(self._page, "incidents"))

    def job(
        self, owner: OneOwner, by: OwnerKind = "job", start: Start = "-1d", end: End = "now"
    ) -> Answer:
        """One job, pod, container, unit or user: GPU hours held, productive, wasted by cause (idle,
        stalls as the verdict explains them), functions by own CPU time; `waiting`: which rank,
        stage or link the other ranks wait for, with evidence and what its node shows."""
        selection = Selection.of(start, end, **{by: owner})
        found = self._server.ask("job", selection.parameters(limit=10))
        found["verdicts"] = [_verdict(one["verdict"]) for one in found["verdicts"]]
        most = {"not_covered": 10, "wasted": 30, "verdicts": 16, "functions": 10, "nodes": 50}
        data, cut = fitting_lists(found, most)
        page = selection.page_url(self._page, "job", by=by, id=owner)
        return self._answer(selection, data, cut, page)

    def owners(
        self, by: OwnerKind = "user", start: Start = "-1d", end: End = "now", limit: Rows = 30
    ) -> Answer:
        """Who held GPUs and what they did with them, most wasted first: hours held, productive
        (kernels ran), stalled (the owner was at work, the GPU was not), idle, unknown."""
        selection = Selection.of(start, end)
        found = self._server.ask("owners", selection.parameters(by=by, limit=limit))
        data, cut = fitting(found["owners"], limit, "owners")
        if found["left_out"]:
            cut.append(f"{found['left_out']:,} owners with less waste are left out")
        not_covered, more = fitting(found["not_covered"], 10, "lines of what is not covered")
        cut += more
        table = {"owners": data, "not_covered": not_covered}
        return self._answer(selection, table, cut, selection.page_url(self._page, "owners", by=by))

    def compare(
        self,
        before_start: Start,
        before_end: End,
        start: Start,
        end: End = "now",
        kind: Kind = "cpu",
        node: Node = "",
        limit: Rows = 20,
    ) -> Answer:
        """Functions whose share of the time changed most between two ranges: `before` and `after`
        are shares of all time of the kind."""
        selection = Selection.of(start, end, node)
        earlier = Selection.of(before_start, before_end, node)
        parameters = selection.parameters(
            kind=kind, limit=limit + 1,
            before_from=repr(earlier.from_s), before_to=repr(earlier.to_s),
        )  # fmt: skip
        rows = [
            row | {name: round(row[name], 5) for name in ("before", "after")}
            for row in self._server.ask("diff", parameters)
        ]
        data, cut = _counted(fitting(rows, limit, "functions"), len(rows) > limit)
        answer = self._answer(
            selection, data, cut, selection.page_url(self._page, "compare", kind=kind)
        )
        answer["evidence"] = {
            "before": earlier.shown() | clean(observed(self._server, earlier)),
            "after": answer["evidence"],
        }
        return answer

    def _asked(
        self, question: str, selection: Selection, what: str, **more: Any
    ) -> tuple[Any, list[str]]:
        """(the answer to a question, lines on what it lacks)"""
        found, left_out = self._server.ask_with_left_out(question, selection.parameters(**more))
        return found, left_out.lines(what)

    def _answer(self, selection: Selection, data: Any, cut: list[str], page: str) -> Answer:
        evidence: dict[str, Any] = clean(observed(self._server, selection))
        return Answer(
            selection=selection.shown(), data=data, left_out=cut, evidence=evidence, page=page
        )


def _counted(found: tuple[list[Any], list[str]], more: bool) -> tuple[list[Any], list[str]]:
    """`found` (of `fitting`); where there are more rows than were asked for (`more`), with a line
    without their number, which is not known."""
    data, cut = found
    return data, [f"only the first {len(data)} are here; there are more"] if more else cut


def _seconds(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with times in seconds, without empty texts and the start of a process."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if value in ("", None) or name == "start_ns":
            continue
        if name.endswith("ns") and name in ("ns", "mean_ns", "most_ns"):
            found[f"{name.removesuffix('ns').rstrip('_') or 'time'}_s"] = round(value / 1e9, 9)
        else:
            found[name] = value
    return found


def _verdict(one: Mapping[str, Any]) -> dict[str, Any]:
    """The main part of a verdict: the first 6 causes of at least 0.5 %, 12 lines of evidence; how
    many there are beyond."""
    causes = [it for it in one["causes"] if it["share"] >= LEAST_SHARE]
    beyond = {
        "causes": len(one["causes"]) - len(causes[:MAX_CAUSES]),
        "places": sum(max(0, len(it["locations"]) - MAX_PLACES) for it in causes[:MAX_CAUSES]),
        "evidence": max(0, len(one["evidence"]) - MAX_EVIDENCE),
        "steps": max(0, len(one["advice"]) - MAX_STEPS),
    }
    return {
        "of": one["device_name"]
        if one["device"] < 0
        else f"GPU{one['device']} {one['device_name']}",
        "bound_by": [{"what": it["key"], "share": round(it["share"], 4)} for it in one["bounds"]],
        "computing_share": round(one["computing"], 4),
        "causes": [
            {
                "cause": it["title"],
                "share": round(it["share"], 4),
                "seconds": round(it["ns"] / 1e9, 3),
                "detail": it["detail"],
                "thread": it["thread"],
                "code": [
                    {"function": place["function"], "caller": place["caller"]}
                    for place in it["locations"][:MAX_PLACES]
                ],
            }
            for it in causes[:MAX_CAUSES]
        ],
        "evidence": one["evidence"][:MAX_EVIDENCE],
        "next_step": [it["text"] for it in one["advice"][:MAX_STEPS]],
        "left_out": {name: count for name, count in beyond.items() if count},
    }


def _ranks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ranks with their sums over the heat map, those with most work first."""
    cells = found["cells"]
    work, waits, seen = ([0.0] * len(found["ranks"]) for _ in range(3))
    for at, rank in enumerate(cells["rank"]):
        work[rank] += cells["work_ns"][at]
        waits[rank] += cells["collective_ns"][at]
        seen[rank] += 1
    median_work = median(work) if work else 0.0
    rows = [
        {
            **{
                name: value
                for name, value in rank.items()
                if value != "" and name not in ("ns", "start_ns")
            },
            "work_s": round(work[at] / 1e9, 4),
            "collective_s": round(waits[at] / 1e9, 4),
            "work_of_median": round(work[at] / median_work, 3) if median_work else None,
            f"{found['by']}_seen": int(seen[at]),
        }
        for at, rank in enumerate(found["ranks"])
    ]
    return sorted(rows, key=lambda row: -row["work_s"])


def _incident(one: Mapping[str, Any]) -> dict[str, Any]:
    from sonde.server import times

    verdict = one["verdict"]
    first = verdict["candidates"][0] if verdict["candidates"] else {}
    return {
        "noticed": times.iso(one["noticed_ns"] / 1e9),
        "node": one["node"],
        "process": f"{one['victim_name']} ({one['victim']})",
        "owner": one["victim_owner"],
        "cause": verdict["cause"],
        "slowdown": verdict["slowdown"],
        "evidence": first.get("evidence", [])[:MAX_INCIDENT_EVIDENCE],
        "evidence_left_out": max(0, len(first.get("evidence", [])) - MAX_INCIDENT_EVIDENCE),
        "offender": first.get("offender"),
        "next_step": first.get("next_step", ""),
    }
