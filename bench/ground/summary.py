# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The short table that is printed last."""

from __future__ import annotations

import json
from typing import Any


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
    print(
        "build workload mode | exit digest | steps/s before idle out in after later | n win fail empty | "
        "lost whole/graphs none stale early>mine long>mine | open close flush ms | kineto got/expected | yields foreign"
    )
    print("not run:", sum(r["exit"] == "not run" for r in report["rows"]))
    for r in report["rows"]:
        if r["exit"] == "not run":
            continue
        w, t, c, x = r.get("work", {}), r.get("truth", {}), r.get("cupti", {}), r.get("rates", {})

        def m(k: str, x: dict[str, Any] = x) -> str:
            return f"{x[k]['median']:.0f}" if k in x else "-"

        same = (
            {True: "same", False: "DIFF"}[w.get("digest") == digests[r["workload"]]]
            if w.get("digest") and r["workload"] in digests
            else "-"
        )
        if w.get("over"):
            same = "over"
        kineto = " ".join(
            f"{s['kernels']}/{s['expected']}{'!' + str(s['strange']) if s['strange'] else ''}"
            for s in w.get("sessions", [])
        )
        print(
            r["build"],
            r["workload"],
            r["mode"],
            "|",
            r["exit"],
            same,
            f"{w.get('attach', {}).get('stop_us', '-')}us",
            "|",
            *(m(k) for k in ("before", "idle", "outside", "inside", "after", "later")),
            m("hooked"),
            m("free"),
            "|",
            t.get("n", "-"),
            t.get("windows", "-"),
            t.get("failed", "-"),
            t.get("empty", "-"),
            "|",
            t.get("single_lost", "-"),
            f"{t.get('graph_whole', '-')}/{t.get('graphs', '-')}",
            t.get("graph_none", "-"),
            t.get("stale", "-"),
            f"{t.get('early', '-')}>{t.get('early_mine', '-')}",
            f"{t.get('long', '-')}>{t.get('long_mine', '-')}",
            "|",
            *(f"{t.get(k, 0):.1f}" for k in ("open_ms", "close_ms", "flush_ms")),
            "|",
            kineto,
            "|",
            c.get("yields", "-"),
            c.get("foreign_buffers", "-"),
            f"hooked {c['hooked']}" if c.get("hooked") else "",
            w.get("kids") or "",
            f"fin {c['finalizes']}-{c['finalize_missed']} {c['finalize_result']}"
            if c.get("finalizes") or c.get("finalize_missed")
            else "",
            (str(r.get("threads", ""))[:200] + r.get("log", "")[-150:]) if r["exit"] else "",
            "STUCK" if w.get("stuck") else "",
            r.get("unread", ""),
        )
