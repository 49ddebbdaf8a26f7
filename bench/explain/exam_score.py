# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.exam_score FOLDER`: verdicts on the recordings of `bench.explain.exam`.

A program's answer is right if Sonde names what costs the time according to its author: as the
largest part of the stalls where it costs at least 35 % of a step, else as any part of at least a
third of its size. Where a program has two causes, each has the size that its author measured
without the other, or half of both. A program counts if all its seeds are right. An offender named
where the author knows of none is counted by itself. These rules were written before the first
recording was judged.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sonde.analyze.bound import explain
from sonde.export import verdict as texts
from sonde.model.timeline import Timeline
from sonde.recording.timelines import open_timeline

LARGE: Final = 0.35
LEAST_PART: Final = 1 / 3
NAMES: Final[dict[str, frozenset[str]]] = {
    "input_pipeline": frozenset({"input"}),
    "host_code": frozenset({"host"}),
    "gc": frozenset({"host"}),
    "io": frozenset({"io"}),
    "synchronization": frozenset({"synchronization"}),
    "launch_overhead": frozenset({"launch", "small kernels"}),
    "device_compute": frozenset({"compute", "kernels", "device"}),
    "device_memory_bandwidth": frozenset({"memory", "kernels", "device"}),
    "copies": frozenset({"copy"}),
    "stream_dependency": frozenset({"dependency", "not taken"}),
    "lock": frozenset({"lock"}),
    "gil": frozenset({"lock"}),
    "gpu_cotenant": frozenset({"gpu contention"}),
    "cpu_starvation": frozenset({"cpu contention"}),
    "sleep_or_remote_wait": frozenset({"io", "sleep"}),
    "allocator": frozenset({"allocation"}),
    "straggler_rank": frozenset({"communication", "io"}),
    "memory": frozenset({"page fault"}),
    "pause": frozenset({"sleep"}),
    "recompilation": frozenset({"host"}),
    "healthy": frozenset({"compute", "memory", "kernels", "device", "small kernels"}),
}
"""What Sonde calls it (bounds, and causes of stalls)."""
_DEVICE: Final = frozenset({"compute", "memory", "kernels", "device", "small kernels", "throttled"})


@dataclass(slots=True)
class Judged:
    """One recording."""

    program: str
    seed: int
    classes: list[str]
    lost_share: float
    named: list[tuple[str, float]] = field(default_factory=list)
    is_right: bool = False
    place: str = ""
    place_right: bool | None = None
    false_offender: bool = False
    failure: str = ""


def main() -> int:
    """Judge all recordings of a folder."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.exam_score")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--loaded",
        action="store_true",
        help="other work kept the CPUs busy: judge the causes of the first verdict without the "
        "contention for CPUs, which is the largest of all programs then",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, help="recordings judged at once")
    args = parser.parse_args()
    judge_one = functools.partial(judge, loaded=args.loaded)
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        judged = list(pool.map(judge_one, sorted(args.folder.glob("*.truth.json"))))
    for one in judged:
        named = ", ".join(f"{name} {share:.0%}" for name, share in one.named[:4])
        mark = "right" if one.is_right else "WRONG"
        place = {True: "place right", False: "place WRONG", None: ""}[one.place_right]
        offender = " FALSE OFFENDER" if one.false_offender else ""
        print(
            f"{one.program} {one.seed}  {mark:5}  {'+'.join(one.classes)} {one.lost_share:.0%}"
            f" | {named} | {place}{offender}{one.failure}"
        )
    print(summary(judged))
    if args.json:
        rows = [{name: getattr(one, name) for name in Judged.__slots__} for one in judged]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def summary(judged: list[Judged]) -> str:
    """Right programs of all, right places, false offenders."""
    programs: dict[str, list[Judged]] = {}
    for one in judged:
        programs.setdefault(one.program, []).append(one)
    right = sum(all(run.is_right for run in runs) for runs in programs.values())
    placed = [one for one in judged if one.place_right is not None]
    return (
        f"{right} of {len(programs)} programs right; "
        f"{sum(one.is_right for one in judged)} of {len(judged)} recordings; "
        f"{sum(one.place_right is True for one in placed)} of {len(placed)} places; "
        f"{sum(one.false_offender for one in judged)} offenders named falsely"
    )


def judge(truth_file: Path, timeline: Timeline | None = None, *, loaded: bool = False) -> Judged:
    """One recording against its truth. `timeline`: the recording, if it was read already."""
    truth = json.loads(truth_file.read_text())
    name, _, seed = truth_file.name.removesuffix(".truth.json").partition("-")
    classes = [cause["class"] for cause in truth["causes"]] or ["healthy"]
    one = Judged(name, int(seed), classes, float(truth["lost_share"]))
    try:
        document = texts.document(explain(timeline or open_timeline(_files_of(truth_file))))
    except Exception as error:
        one.failure = f" {type(error).__name__}: {error}"
        return one
    named, locations = _named(document)
    if loaded and "cpu_starvation" not in classes:
        causes = document["verdicts"][0]["causes"] if document["verdicts"] else []
        named = {}
        for cause in causes:
            named[cause["bound"]] = named.get(cause["bound"], 0.0) + cause["share"]
            if cause["key"] == "sleep":
                named["sleep"] = cause["share"]  # a bound by itself; it was host code once
        named.pop("cpu contention", None)
    one.named = sorted(named.items(), key=lambda pair: -pair[1])
    sizes = [float(cause.get("share", math.nan)) for cause in truth["causes"]] or [math.nan]
    one.is_right = all(
        _is_named(kind, one, named, size) for kind, size in zip(classes, sizes, strict=True)
    )
    one.false_offender = "gpu_cotenant" not in classes and named.get("gpu contention", 0) >= 0.02
    places = [cause["place"] for cause in truth["causes"] if cause.get("place")]
    if places and classes != ["healthy"]:
        one.place = places[0]
        function = re.split(r"[ (]", places[0])[0].split(".")[-1]
        one.place_right = any(function in text for text in locations)
    return one


def capture_of(truth_file: Path) -> Path:
    """The recording that a truth belongs to."""
    return truth_file.with_name(truth_file.name.removesuffix(".truth.json") + ".sonde")


def _files_of(truth_file: Path) -> list[Path]:
    """The recording, or a full trace and what was recorded beside it."""
    capture = capture_of(truth_file)
    trace = capture.with_suffix(".json.gz")
    return [one for one in (trace, capture) if one.is_file()] or [capture]


def _named(document: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """(share of the time by bound and cause, code that is named), over all verdicts."""
    named: dict[str, float] = {}
    locations: list[str] = []
    for verdict in document["verdicts"]:
        for bound in verdict["bounds"]:
            named[bound["key"]] = max(named.get(bound["key"], 0.0), bound["share"])
            locations += _places(bound["locations"])
        for cause in verdict["causes"]:
            if cause["key"] == "sleep":
                named["sleep"] = max(named.get("sleep", 0.0), cause["share"])
            locations += _places(cause["locations"])
            locations += list(cause["facts"])
        if verdict.get("bound"):
            named.setdefault(str(verdict["bound"]), 0.0)
    return named, locations


def _places(locations: list[dict[str, Any]]) -> list[str]:
    """Functions, and who called them."""
    return [place[key] for place in locations for key in ("function", "caller")]


def _is_named(kind: str, one: Judged, named: dict[str, float], size: float) -> bool:
    """`size`: share of a step that this cause costs alone; NaN where that was not measured."""
    names = NAMES[kind]
    share = max((named.get(name, 0.0) for name in names), default=0.0)
    if kind in ("healthy", "device_compute", "device_memory_bandwidth"):
        return share > 0 and share >= max(named.values(), default=0.0)
    if one.lost_share >= LARGE and len(one.classes) == 1:
        stalls = [value for name, value in named.items() if name not in _DEVICE]
        return share > 0 and share >= max(stalls, default=0.0)
    if math.isnan(size) or len(one.classes) == 1:
        size = one.lost_share / len(one.classes)
    return share >= LEAST_PART * max(size, 0.03)


if __name__ == "__main__":
    sys.exit(main())
