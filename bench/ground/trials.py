# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Which trials there are, and the script of each."""

from __future__ import annotations

from typing import Any


def script(
    mode: str, spec: str, rate: float, dump: str, phase_s: float, windows_s: float
) -> tuple[list[list[Any]], float]:
    """The lines of one trial and its length in seconds of steps."""
    a, w = max(60, int(rate * phase_s)), max(60, int(rate * windows_s))
    on, off = 50, 250
    n = max(2, int(windows_s * 1000 / (on + off) * 1.05))
    end = [["command", "flush"], ["command", f"dump {dump}"], ["wait"]]
    begin: list[list[Any]] = [
        ["steps", a, "before"],
        ["attach"],
        ["command", f"init {spec}"],
        ["wait"],
        ["steps", a, "idle"],
    ]
    if mode == "none":
        return [["steps", a, "before"], ["steps", w, "more"]], phase_s + windows_s
    if mode == "idle":
        return [["steps", a, "before"], ["attach"], ["steps", a, "idle"], *end], 3 * phase_s
    if mode == "hook":
        ops: list[list[Any]] = [["steps", a // 2, "before"], ["attach"]]
        for _ in range(5):
            ops += [
                ["command", "hook 1"],
                ["wait"],
                ["steps", a // 3, "hooked"],
                ["command", "hook 0"],
                ["wait"],
                ["steps", a // 3, "free"],
            ]
        return [*ops, *end], phase_s * 5
    if mode in ("kineto", "kineto-yield"):
        flags = "ry" if mode.endswith("yield") else "r"
        watch = [["command", "watch"]]
        kinds = "k"  # Kineto keeps CUPTI's one subscription for good once it was used
        return [
            ["kineto", 20],
            *begin[:3],
            *watch,
            ["wait"],
            ["command", f"windows {kinds} {on} 150 {int(windows_s * 5)} {flags}"],
            ["steps", w // 3, "windows1"],
            ["kineto", 20],
            ["steps", w // 3, "windows2"],
            ["kineto", 20],
            ["steps", w // 3, "windows3"],
            ["wait"],
            ["kineto", 20],
            ["steps", a, "later"],
            *end,
        ], windows_s * 2 + phase_s * 3
    if mode == "fork":
        return [
            *begin,
            ["command", f"windows kc {on} 50 {n} r"],
            ["fork", 8],
            ["steps", w, "windows"],
            ["wait"],
            *end,
        ], windows_s + 4 * phase_s + 4
    if mode == "fork-control":
        return [["fork", 8], ["steps", a, "before"]], phase_s + 4
    if mode == "exit":
        return [*begin, ["command", f"windows kc {on} {off} 2 r"], ["wait"], *end], 4 * phase_s
    if mode == "cycles":  # many attaches' worth of windows: short, dense
        return [
            *begin,
            ["command", "windows kc 10 20 100 r"],
            ["steps", w, "windows"],
            ["wait"],
            ["steps", a, "later"],
            *end,
        ], windows_s + 4 * phase_s + 2
    kinds, _, flags = mode.partition("/")
    return [
        *begin,
        ["command", f"windows {kinds} {on} {off} {n} {flags or 'r'}"],
        ["steps", w, "windows"],
        ["wait"],
        ["steps", a, "later"],
        *end,
    ], windows_s + 4 * phase_s + 1


def plan(which: str, builds: list[str]) -> list[tuple[str, str, str]]:
    """(build, workload, mode): a build is own, pre-X (loaded before torch's) or late-X (a second copy)."""
    works = ("eager", "graph", "decode")
    pre = [f"pre-{b}" for b in builds if not b.startswith("12")]
    cells = [("own", w, "none") for w in works]
    if which == "first":
        cells += [("own", w, "kc") for w in works]
        cells += [("own", w, m) for w in ("eager", "graph") for m in ("kineto-yield", "kineto")]
        cells += [("own", w, m) for m in ("k", "kr") for w in works]
        cells += [(b, w, "kc") for b in reversed(pre) for w in works]
        cells += [("own", w, "hook") for w in works]
        cells += [(pre[-1], w, "kineto-yield") for w in ("eager", "graph")] if pre else []
        cells += [
            (f"late-{b}", w, "kc")
            for b in (builds[-1], "12.9")
            if b in builds
            for w in ("eager", "graph")
        ]
        cells += [
            ("own", "graph", "exit"),
            ("own", "eager", "fork"),
            ("own", "eager", "fork-control"),
        ]
        cells += [
            ("own", "graph", "k/rf"),
            ("own", "decode", "kineto-yield"),
            ("own", "decode", "cycles"),
        ]
    else:
        cells += [("own", w, m) for m in ("idle", "kc", "k/rz") for w in works]
        cells += [
            ("own", "eager", "kineto-yield"),
            ("own", "graph", "kineto-yield"),
            ("own", "eager", "kineto"),
        ]
        cells += [(b, w, "kc") for b in reversed(pre) if b != "pre-13.0" for w in works]
        cells += [(pre[-1], w, "k/rz") for w in works] if pre else []
        cells += [
            (f"late-{b}", w, "kc")
            for b in (builds[-1], "12.9")
            if b in builds
            for w in ("eager", "graph")
        ]
        cells += [("own", w, "hook") for w in ("eager", "decode")]
        cells += [
            ("own", "graph", "exit"),
            ("own", "eager", "fork"),
            ("own", "eager", "fork-control"),
        ]
        cells += [(pre[-1], w, "kineto-yield") for w in ("eager", "graph")] if pre else []
        cells += [
            ("own", "decode", "cycles"),
            ("own", "graph", "cycles"),
            ("own", "eager", "kr"),
            ("own", "decode", "kineto-yield"),
        ]
        cells += [("own", w, m) for m in ("none", "k/rz", "idle") for w in ("graph", "decode")]
    return cells
