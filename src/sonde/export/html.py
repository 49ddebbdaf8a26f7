# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page: the verdict, an interactive flame graph and tables.

Its flame graph and its verdict are drawn by code of the server's page (web/src/report.tsx), which
`scripts/setup` builds. The page needs no network and no server. Its content security policy allows
its own script and style by their hashes, and nothing else. The data is embedded as base64 of
gzipped JSON, so that no name in it can become markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import io
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.resources import files
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sonde.errors import MissingDependency
from sonde.export import call_tree, json_report, metric_charts, strict_json, verdict
from sonde.export.call_tree import CallTree
from sonde.export.summary import directions
from sonde.model.profile import BASIC_KINDS, ProfileKind
from sonde.model.verdict import Explained
from sonde.query import queries
from sonde.query.device_runs import device_runs
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session
from sonde.query.wait_rows import WaitRows

MAX_NODES = 150_000
"""Of the flame graph's tree: a page loads them in well under a second."""
MAX_ROWS = 5_000
"""Rows of each table, the first ones."""

_LEVEL = 4
"""Of compression: level 6 takes three times as long for 3 to 7 % less."""
_RENDERER, _STYLE_OF_VERDICT = "boxes.js", "verdict.css"
"""Built from web/src/report.tsx."""
_SCRIPTS = ("numbers.js", "capture.js", "tree.js", "colours.js", "flame.js", "tables.js", "page.js")


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
    explained: Explained | None = None,
) -> None:
    """Write the page. It opens with the first of the kinds that is not empty, below the verdict
    where one is given.

    Raises MissingDependency where the renderer was not built.
    """
    script = _built(_RENDERER) + "".join(_asset(name) for name in _SCRIPTS)
    style = _asset("page.css") + _built(_STYLE_OF_VERDICT)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(script)}; style-src {_hash(style)}; require-trusted-types-for 'script'"
    )
    document = _document(session, kinds, where)
    document["verdict"] = explained and verdict.shown(explained)
    parts: dict[str, str | dict[str, Any]] = {
        "@policy@": policy,
        "@title@": html.escape(f"{session.info.path.name} · Sonde"),
        "@style@": style,
        "@data@": document,
        "@script@": script,
    }
    # Split, not replaced one by one: a value may contain another placeholder.
    page = _asset("page.html")
    for mark, value in parts.items():
        before, found, rest = page.partition(mark)
        if not found:
            raise ValueError(f"page.html has no {mark}, or not in this order")
        out.write(before.encode())
        if isinstance(value, str):
            out.write(value.encode(errors="replace"))
        else:
            _write_packed(value, out)
        page = rest
    out.write(page.encode())


def _write_packed(document: dict[str, Any], out: BinaryIO) -> None:
    """Write a document as base64 of gzipped JSON, in pieces: another thread compresses one while
    the next is made."""
    base64_writer = _Base64(out)
    compressed: Future[int] | None = None
    with (
        gzip.GzipFile("", "wb", _LEVEL, base64_writer, mtime=0) as packed,
        ThreadPoolExecutor(1, "compress") as pool,
    ):

        def write(piece: bytes) -> None:
            nonlocal compressed
            if compressed:
                compressed.result()
            compressed = pool.submit(packed.write, piece)

        strict_json.write_compact(write, document)
        if compressed:
            compressed.result()
    base64_writer.finish()


class _Base64(io.RawIOBase):
    """A stream that writes bytes as base64."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._rest = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        whole = self._rest + bytes(data)
        end = len(whole) - len(whole) % 3
        self._out.write(base64.b64encode(whole[:end]))
        self._rest = whole[end:]
        return len(data)

    def finish(self) -> None:
        """Write the last, incomplete group of three bytes."""
        self._out.write(base64.b64encode(self._rest))


def _asset(name: str) -> str:
    return files("sonde.export").joinpath("assets", name).read_text(encoding="utf-8")


def _built(name: str) -> str:
    try:
        text = files("sonde.export").joinpath("built", name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingDependency(
            "the page's renderer is not built",
            "run scripts/setup build in the source tree, with Node.js; or choose another --format",
        ) from None
    if "</" in text:
        raise ValueError(f"{name} would end its element")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _document(session: Session, kinds: Sequence[ProfileKind], where: Where) -> dict[str, Any]:
    # What takes most memory comes last, when nothing but the tables is kept.
    tables = _tables(session, kinds, where)
    tree = _tree(_call_tree(session, kinds, where))
    processes, threads = session.processes, session.threads
    idle = np.zeros(len(threads), np.int64)
    idle[[*queries.idle_threads(session)]] = 1
    return {
        "capture": json_report.capture(session.info),
        "filtered": where != EVERYTHING,
        "hide": session.hide.label if session.hide else "",
        "processes": {
            "pid": processes.pid,
            "name": processes.names,
            "kernel": processes.is_kernel.astype(np.int8),
        },
        "threads": {
            "process": threads.process,
            "tid": threads.tid,
            "name": threads.names,
            "idle": idle,
        },
        "tree": tree,
        "tables": tables,
    }


def _call_tree(session: Session, kinds: Sequence[ProfileKind], where: Where) -> CallTree:
    profiles = [queries.profile(session, kind, where) for kind in kinds]
    return call_tree.build(profiles, MAX_NODES, session.hold)


def _tree(tree: CallTree) -> dict[str, Any]:
    functions = tree.functions
    return {
        "name": [function.name for function in functions],
        "kind": [function.kind for function in functions],
        "binary": [function.binary for function in functions],
        "file": [function.file for function in functions],
        "firstLine": [function.first_line for function in functions],
        "lastLine": [function.last_line for function in functions],
        "parent": tree.parent,
        "function": tree.function,
        "folded": tree.folded_nodes,
        "kinds": {
            kind: {
                "thread": rows.thread,
                "node": rows.node,
                "count": rows.events,
                "ns": rows.ns,
                "bytes": rows.bytes,
            }
            for kind, rows in tree.kinds.items()
        },
    }


def _tables(session: Session, kinds: Sequence[ProfileKind], where: Where) -> dict[str, Any]:
    every = queries.waits(session, where)
    chosen = every.of_kinds(kinds)
    calls = queries.device_calls(session, where) if ProfileKind.GPU_CALLS in kinds else []
    runs = device_runs(session, where) if ProfileKind.GPU_TIME in kinds else []
    uses = queries.processes(session, where)
    return {
        "waits": _waits(every, chosen[:MAX_ROWS]),
        "waitsInAll": len(chosen),
        "calls": [
            {
                "process": session.processes.number_of(call.process),
                "function": call.function,
                "api": call.api,
                "op": call.op,
                "count": call.calls,
                "bytes": call.bytes_total,
                "directions": directions(call),
                "ns": call.ns,
                "max": call.max_ns,
                "errors": call.errors,
            }
            for call in calls[:MAX_ROWS]
        ],
        "callsInAll": len(calls),
        "runs": [
            {
                "process": session.processes.number_of(run.process),
                "kind": run.kind,
                "name": run.name,
                "sources": run.sources,
                "timed": run.timed,
                "count": run.count,
                "ns": run.ns,
                "error": run.error_ns,
                "p50": run.p50_ns,
                "p99": run.p99_ns,
                "bytes": run.bytes,
            }
            for run in runs[:MAX_ROWS]
        ],
        "runsInAll": len(runs),
        "processes": [
            {
                "process": process,
                "threads": use.threads,
                "samples": use.cpu_samples,
                "cpu": use.cpu_ns,
                "blocked": use.blocked_ns,
                "runqueue": use.runqueue_ns,
                "calls": use.device_calls,
                "device": use.device_ns,
            }
            for process, use in zip(uses.process.tolist(), uses[:MAX_ROWS], strict=False)
        ],
        "processesInAll": len(uses),
        "losses": [
            {"name": loss.name, "amount": loss.amount, "text": loss.text}
            for loss in queries.losses(session)
        ],
        "notices": [
            {
                "name": notice.name,
                "process": notice.process,
                "count": notice.count,
                "text": notice.text,
            }
            for notice in queries.notices(session)[:MAX_ROWS]
        ],
        "charts": [
            {
                "name": chart.name,
                "of": " ".join((chart.of, *chart.about)).strip(),
                "bars": metric_charts.bars(chart.cells, chart.top),
                "values": [
                    metric_charts.amount(value, chart.unit)
                    for value in (chart.low, chart.mean, chart.high)
                ],
            }
            for chart in metric_charts.all_charts(session, where)[:MAX_ROWS]
        ],
        "metrics": [
            {"series": metric.series, "labels": metric.labels, "last": metric.last}
            for metric in queries.metrics(session)[:MAX_ROWS]
            if metric.series.startswith("sonde.") and not metric.labels
        ],
    }


def _waits(every: WaitRows, rows: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """Rows of the table of waits, without an object for each."""
    hints, hint = every.hints(rows)
    wakers, waker = every.wakers(rows)
    numbers = (every.thread, every.kind, every.reason, every.system_call)
    sums = (every.events, every.ns, every.max_ns)
    columns = [column[rows].tolist() for column in (*numbers, *sums)]
    return [
        {
            "thread": thread,
            "kind": every.kinds[kind],
            "reason": every.reasons[reason],
            "call": every.system_calls[call],
            "count": count,
            "ns": ns,
            "max": max_ns,
            "waker": wakers[waker_at],
            "hint": hints[hint_at].location or hints[hint_at].function,
            "binary": "" if hints[hint_at].location else hints[hint_at].binary,
        }
        for thread, kind, reason, call, count, ns, max_ns, waker_at, hint_at in zip(
            *columns, waker.tolist(), hint.tolist(), strict=True
        )
    ]
