# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The table of the CUPTI matrix that `bench.ground.matrix` prints last: one line a run, in groups of
columns that `|` separates (LEGEND)."""

from __future__ import annotations

import json
from typing import Any

LEGEND = """\
build, workload, mode
exit: of the workload; digest: of its results beside those without a tool (same, DIFF), or over:
  its time was up; stop: how long the attach stopped it
steps/s: before the attach, idle, outside windows, inside, right after, later; with hooks, without
n: kernels recorded; windows, of them failed and empty (no kernel of more than 5 steps)
lost: single launches not recorded once; graphs recorded whole/all, graphs without a record;
  stale: kernels whose launch is not of the window; early: kernels that began before it > of these,
  launched in it; long: kernels of more than 20 ms > of these, launched in it
ms to open a window, to close it, to flush it
kineto: kernels/expected of each session of torch.profiler, ! those that are strange
yields: to another user of CUPTI; foreign: its buffers, handed to us; then hooks, children,
  fin CALLS-MISSED RESULT of cuptiFinalize, and what the run left"""


def table(report: dict[str, Any]) -> None:
    for name in ("launch", "launch_static"):
        if "exit" in report.get(name, {}) or "failed" in report.get(name, {}):
            print(name, report[name])
            continue
        for k, v in sorted(
            report.get(name, {}).items(),
            key=lambda kv: kv[1]["median_ns"] if isinstance(kv[1], dict) else 0,
        ):
            print(
                f"{name:14} {k:42} {v if not isinstance(v, dict) else round(v['median_ns'])} {v.get('seen') if isinstance(v, dict) else ''}"
            )
    for k, v in report.get("stages", {}).items():
        print(k, json.dumps(v).replace('"', "").replace(", ", ","))
    digests: dict[str, str] = {}
    for r in report["rows"]:
        if r["mode"] == "none" and "work" in r:
            digests.setdefault(r["workload"], r["work"]["digest"])
    print(LEGEND)
    print("not run:", sum(r["exit"] == "not run" for r in report["rows"]))
    for r in report["rows"]:
        if r["exit"] == "not run":
            continue
        work, truth = r.get("work", {}), r.get("truth", {})
        cupti, rates = r.get("cupti", {}), r.get("rates", {})

        def rate(part: str, rates: dict[str, Any] = rates) -> str:
            return f"{rates[part]['median']:.0f}" if part in rates else "-"

        same = (
            {True: "same", False: "DIFF"}[work.get("digest") == digests[r["workload"]]]
            if work.get("digest") and r["workload"] in digests
            else "-"
        )
        if work.get("over"):
            same = "over"
        kineto = " ".join(
            f"{s['kernels']}/{s['expected']}{'!' + str(s['strange']) if s['strange'] else ''}"
            for s in work.get("sessions", [])
        )
        print(
            r["build"],
            r["workload"],
            r["mode"],
            "|",
            r["exit"],
            same,
            f"{work.get('attach', {}).get('stop_us', '-')}us",
            "|",
            *(rate(k) for k in ("before", "idle", "outside", "inside", "after", "later")),
            rate("hooked"),
            rate("free"),
            "|",
            truth.get("n", "-"),
            truth.get("windows", "-"),
            truth.get("failed", "-"),
            truth.get("empty", "-"),
            "|",
            truth.get("single_lost", "-"),
            f"{truth.get('graph_whole', '-')}/{truth.get('graphs', '-')}",
            truth.get("graph_none", "-"),
            truth.get("stale", "-"),
            f"{truth.get('early', '-')}>{truth.get('early_mine', '-')}",
            f"{truth.get('long', '-')}>{truth.get('long_mine', '-')}",
            "|",
            *(f"{truth.get(k, 0):.1f}" for k in ("open_ms", "close_ms", "flush_ms")),
            "|",
            kineto,
            "|",
            cupti.get("yields", "-"),
            cupti.get("foreign_buffers", "-"),
            f"hooked {cupti['hooked']}" if cupti.get("hooked") else "",
            work.get("kids") or "",
            f"fin {cupti['finalizes']}-{cupti['finalize_missed']} {cupti['finalize_result']}"
            if cupti.get("finalizes") or cupti.get("finalize_missed")
            else "",
            (str(r.get("threads", ""))[:200] + r.get("log", "")[-150:]) if r["exit"] else "",
            "STUCK" if work.get("stuck") else "",
            r.get("unread", ""),
        )
