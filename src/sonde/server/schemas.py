# SPDX-License-Identifier: Apache-2.0
"""The answers as JSON Schema; tests/unit/test_server_answers.py checks real answers against it.

Every property of an object is always there. Units are in the names: `_ns` and `_s` (of time
points: since 1970), `_h` (hours of one GPU), `bytes`. Times of alerts are text (ISO 8601). What
one property means stands beside it. Names that stand in several answers:

- `boxes`, `cells`, `slots`: tables by column. Entry i of each list is of row i. `slots` are time
  bins, `lanes` the rows of a timeline, `boxes` the spans in them.
- `n`: how many events; `rows`: how many rows of the store they are in; `value`: in the unit of the
  metric or of the answer's `unit`; `least`, `most`: the smallest and largest value.
- `work`, `collective` (of a rank): shares of its time in kernels other than collectives, and in
  collectives. `error` (of a count): half the width of its 95 % confidence interval.
- `left_out`, `older`: how many entries there are beyond those in the answer. `not_shown`: what the
  answer leaves out: a weight, in the flame tree's `unit`, or a number of alerts.
  `in_noise`: how many classes of a release have a count within its noise, so that it is not shown.
  `not_covered`: sentences on what the figures leave out.
- `shown`: whether this server has a folder of such files at all. `open`: whether it needs no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_INT: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_MAYBE_NUMBER: Schema = {"type": ["number", "null"]}


def _described(schema: Schema, text: str) -> Schema:
    """With a comment: in /openapi.json, and in the page's types (scripts/web_types.py)."""
    return schema | {"description": text}


_OF_TIMED = _described(
    _NUMBER,
    "share of the slots (steps or parts of the time) in which the rank was timed; runs of several "
    "streams add up, so it may be above 1",
)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_WEIGHTS = {"n": _NUMBER, "ns": _NUMBER, "bytes": _NUMBER}
_FRAME = _object(kind=_TEXT, function=_TEXT, binary=_TEXT, file=_TEXT, line=_INT)
FLAME_NODE: Schema = {
    "type": "object",
    "required": ["binary", "kind", "name", "self", "value"],
    "properties": {
        "name": _TEXT,
        "binary": _TEXT,
        "kind": _TEXT,
        "value": _NUMBER,
        "self": _NUMBER,
        "children": {"type": "array", "items": {"$ref": "#/components/schemas/FlameNode"}},
    },
}
"""A box of `flametree`: a function with all that it called. `self`: without that."""
_PROCESS = dict.fromkeys(
    ("comm", "exe", "command", "user", "pod", "namespace", "job", "container", "unit"), _MAYBE_TEXT
)

_ANY: Schema = {"type": "object"}
_GPU_HOURS = dict.fromkeys(
    ("held_h", "productive_h", "stalled_h", "idle_h", "unknown_h", "wasted_h"), _NUMBER
) | {"joules": _MAYBE_NUMBER}

ANSWERS: Mapping[str, Schema] = {
    "overview": _list(
        _object(
            node=_TEXT, chunks=_INT, first_ns=_INT, last_ns=_INT, seconds=_NUMBER,
            cpu_ns=_MAYBE_NUMBER, blocked_ns=_MAYBE_NUMBER, runqueue_ns=_MAYBE_NUMBER,
            device_ns=_MAYBE_NUMBER, kernel_ns=_MAYBE_NUMBER, lost=_NUMBER,
        )
    ),
    "flamegraph": _object(
        total=_object(rows=_NUMBER, **_WEIGHTS),
        frames=_list(_FRAME),
        stacks=_list(_object(frames=_list(_INT), **_WEIGHTS)),
    ),
    "flametree": _object(
        unit={"enum": ["ns", "bytes"]},
        total=_NUMBER,
        not_shown=_described(_NUMBER, "weight of the stacks that are not in the tree, in `unit`"),
        left_out=_described(_INT, "boxes too light to be in the tree; their weight is in `root`"),
        root={"$ref": "#/components/schemas/FlameNode"},
    ),
    "lanes": _object(
        start_ns=_INT,
        end_ns=_INT,
        lanes=_list(
            _object(
                lane=_INT, node=_TEXT, lane_kind=_TEXT, pid=_INT, tid=_INT, comm=_TEXT,
                device=_INT, stream=_INT, ns=_INT,
            )
        ),
        boxes=_object(
            lane=_list(_INT), start=_list(_INT), end=_list(_INT), name=_list(_TEXT),
            n=_list(_INT), ns=_list(_INT),
        ),
    ),
    "frames": _list(_object(key=_INT, **_FRAME["properties"])),
    "totals": _object(rows=_NUMBER, **_WEIGHTS),
    "top": _list(_object(function=_TEXT, binary=_TEXT, own_ns=_NUMBER, total_ns=_NUMBER)),
    "names": _list(_object(name=_TEXT, **_WEIGHTS)),
    "processes": _list(_object(node=_TEXT, pid=_INT, start_ns=_INT, **_WEIGHTS, **_PROCESS)),
    "traces": _list(
        _object(
            trace_id=_TEXT, nodes=_INT, processes=_INT, first_ns=_INT, last_ns=_INT, n=_NUMBER,
            cpu_ns=_NUMBER, blocked_ns=_NUMBER, runqueue_ns=_NUMBER,
        )
    ),
    "diff": _list(_object(function=_TEXT, binary=_TEXT, before=_NUMBER, after=_NUMBER)),
    "series": _list(
        _object(
            node=_TEXT, labels=_TEXT, time_ns=_INT, value=_NUMBER, least=_NUMBER, most=_NUMBER
        )
    ),
    "charts": _list(
        _object(
            node=_TEXT, series=_TEXT, labels=_TEXT, time_ns=_INT, value=_NUMBER, least=_NUMBER,
            most=_NUMBER,
        )
    ),
    "devices": _list(
        _object(
            node=_TEXT, series=_TEXT, labels=_TEXT, mean=_NUMBER, least=_NUMBER, most=_NUMBER,
            last=_NUMBER,
        )
    ),
    "kernels": _list(
        _object(
            kind=_described(_TEXT, "kernel, replay (of a whole graph), copy or set (of memory)"),
            name=_TEXT,
            runs=_described(_NUMBER, "how many there were, estimated from those timed"),
            ns=_NUMBER, mean_ns=_NUMBER, most_ns=_described(_INT, "the longest"),
            timed=_described(_INT, "runs whose time was measured"),
        )
    ),
    "metrics": _list(_object(series=_TEXT, nodes=_INT, rows=_INT)),
    "nodes": _list(
        _object(
            node=_TEXT, chunks=_INT, sample_rows=_INT, first_ns=_INT, last_ns=_INT,
            size_bytes=_INT, about=_TEXT,
        )
    ),
    "ranks": _object(
        by={"enum": ["steps", "time"]},
        slots=_object(start_ns=_list(_INT), end_ns=_list(_INT)),
        ranks=_list(
            _object(
                node=_TEXT, pid=_INT, start_ns=_INT, device=_INT, ns=_NUMBER, comm=_TEXT,
                command=_described(_TEXT, "of an interpreter what it runs, and its rank"),
                job=_TEXT, user=_TEXT, pod=_TEXT, container=_TEXT,
                all_timed=_described(_BOOLEAN, "whether every run of it was timed"),
            )
        ),
        cells=_described(
            _object(
                rank=_list(_INT), slot=_list(_INT), work_ns=_list(_NUMBER),
                collective_ns=_list(_NUMBER), runs=_list(_INT),
            ),
            "cells of the heat map of ranks, a table by column: `rank` and `slot` are indices of "
            "`ranks` and `slots`, `runs` those timed. A rank without a cell in a slot was not "
            "timed there",
        ),
        collectives=_described(_INT, "kernels (by name) that are collectives"),
        left_out=_INT,
    ),
    "jobs": _list(_object(job=_TEXT, ranks=_INT, first_ns=_INT, last_ns=_INT, start_ns=_INT)),
    "memory": _list(
        _object(
            node=_TEXT, pid=_INT, start_ns=_INT, mapped=_NUMBER, unmapped=_NUMBER,
            grown=_described(_NUMBER, "mapped less unmapped"),
            faulted=_described(_NUMBER, "touched first"),
            reserved=_described(_NUMBER, "mapped without access rights: addresses alone"),
            **_PROCESS,
        )
    ),
    "job": _object(
        by=_TEXT, id=_TEXT, slot_s=_NUMBER, nodes=_list(_TEXT), gpus=_INT, **_GPU_HOURS,
        wasted=_list(_object(cause=_TEXT, gpu_h=_NUMBER)),
        verdicts=_list(_object(node=_TEXT, start_ns=_INT, end_ns=_INT, verdict=_ANY)),
        functions=_list(_object(function=_TEXT, binary=_TEXT, own_ns=_NUMBER, total_ns=_NUMBER)),
        waiting=_object(
            kind=_TEXT, text=_TEXT, count=_described(_INT, "how many ranks the others wait for"),
            compared=_described(_INT, "ranks that were timed at the same time"),
            lost_s=_described(_NUMBER, "of each step or second: see `per`"),
            per={"enum": ["step", "second"]}, evidence=_list(_TEXT),
            missing=_described(_list(_TEXT), "sentences: what is not known, or left out"),
            start_ns=_INT, end_ns=_INT,
            ranks=_list(
                _object(
                    node=_TEXT, pid=_INT, device=_INT, comm=_TEXT, command=_TEXT,
                    number=_described(_INT, "the rank's number in the heat map of ranks"),
                    work=_OF_TIMED, collective=_OF_TIMED,
                )
            ),
            node=_described(
                {"type": ["object", "null"]}, "what the data of the first rank's node shows"
            ),
        ),
        not_covered=_list(_TEXT),
    ),
    "owners": _object(
        by=_TEXT, slot_s=_NUMBER,
        owners=_list(_object(owner=_TEXT, nodes=_INT, gpus=_INT, **_GPU_HOURS)),
        left_out=_INT, not_covered=_list(_TEXT),
    ),
    "holders": _object(
        by=_TEXT, holders=_list(_object(node=_TEXT, owner=_TEXT, gpus=_INT, **_GPU_HOURS)),
    ),
    "losses": _list(_object(node=_TEXT, name=_TEXT, value=_NUMBER)),
}  # fmt: skip
"""The answers by question. `pprof` is no JSON; `verdict` is what `sonde explain --json` writes, and
is part of `timeline`, whose columns are described with the page (web/src)."""

_CLASSES = _object(
    rows=_list(_object(name=_TEXT, count=_INT, error=_NUMBER, share=_NUMBER, share_error=_NUMBER)),
    in_noise=_INT,
    left_out=_INT,
)
FLEET: Schema = _object(
    shown=_BOOLEAN,
    releases=_list(
        _object(
            id=_TEXT, task=_TEXT, start_s=_INT, duration_s=_INT, unit=_TEXT, privacy=_TEXT,
            delta=_NUMBER, budget=_NUMBER,
            samples=_described(_INT, "the sum of all buckets: noised counts of samples"),
            buckets=_INT,
            collected=_described(_INT, "releases that the collector has collected; 0 not known"),
            spent=_described(
                _list(
                    _object(
                        unit=_TEXT, one_release=_MAYBE_NUMBER, worst_year=_MAYBE_NUMBER,
                        full_year=_MAYBE_NUMBER,
                    )
                ),
                "privacy budget (epsilon) that was spent on each unit of privacy; null: no bound "
                "is known",
            ),
            applications=_CLASSES, kernels=_CLASSES,
        )
    ),
    older=_INT,
    unreadable=_INT,
)  # fmt: skip
"""Releases of the fleet protocol, from files."""
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
ALERTS: Schema = _object(
    rules=_list(
        _object(
            name=_TEXT, question=_TEXT, measured=_TEXT, comparison={"enum": ["above", "below"]},
            threshold=_NUMBER, unit=_TEXT,
            series=_described(_TEXT, "the name of the metric, of a rule on one"),
            for_s=_NUMBER, error=_TEXT,
            left_out=_described(_INT, "values beyond those that the rule compares"),
        )
    ),
    alerts=_list(
        _object(
            status={"enum": ["pending", "firing", "resolved"]}, labels=_TEXTS, annotations=_TEXTS,
            value=_NUMBER, since=_TEXT, fired=_MAYBE_TEXT, resolved=_MAYBE_TEXT, page=_TEXT,
        )
    ),
    not_shown=_described(_INT, "alerts beyond those in `alerts`"),
)  # fmt: skip
"""Rules of alerts and their alerts."""
IDENTITY: Schema = _object(tenant=_TEXT, scopes=_list(_TEXT), open=_BOOLEAN)
"""Whose data a caller sees."""
UNDESCRIBED = frozenset({"pprof", "timeline", "verdict"})
"""Questions that `ANSWERS` lacks."""
