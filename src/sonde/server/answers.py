# SPDX-License-Identifier: Apache-2.0
"""Questions as they are asked over HTTP, and their answers as JSON or an Arrow stream."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from sonde.errors import CaptureTooLarge, UsageError
from sonde.export import packed, strict_json
from sonde.limits import common_length, cut
from sonde.query import (
    flame_boxes,
    stored,
    stored_charts,
    stored_memory,
    stored_objects,
    stored_ranks,
    stored_traces,
    stored_views,
)
from sonde.query.flame_boxes import Boxes
from sonde.query.selection import Selection
from sonde.query.stored_capture import MAX_ROWS
from sonde.query.stored_flame import SHORT_CHARS, TEXTS_BYTES, UNKNOWN, FlameStacks
from sonde.query.stored_session import QueryTimedOutError, StoredSession, UnreadableStoreError
from sonde.query.table_columns import columns
from sonde.server import job, timeline_answers
from sonde.server.children import BusyError
from sonde.server.damaged_files import IntactPaths
from sonde.server.parameters import MEMORY_KINDS, Form, Options
from sonde.server.served_session import ServedSession
from sonde.server.service import RefusedRequestError, Service
from sonde.server.tokens import Caller

ANSWER_BYTES = 64 << 20
"""Of JSON and columns, uncompressed."""
TEXT_CHARS = stored.TEXT_CHARS
"""Texts in an answer are cut to this length."""
_ROWS_AT_ONCE = 256
"""Rows that are written as JSON together: the limits are checked between."""
_STACKS_AT_ONCE = 32
"""Stacks of a flame graph that are: each has up to a thousand numbers."""

BY_TRACE = frozenset(
    ("flamegraph", "flametree", "pprof", "totals", "top", "names", "processes", "traces")
)
"""Questions that a trace can be chosen for."""
_LISTED_BY_TRACE = ", ".join(sorted(BY_TRACE))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it is sent."""

    content: bytes
    media_type: str
    left_out: int = 0
    """Damaged files, whose rows it lacks."""
    rows_left_out: int = 0
    """Rows, series or intervals that it has no room for."""


@dataclass(frozen=True, slots=True)
class Question:
    """Something that can be asked: GET /v1/NAME."""

    about: str
    """Its description in /openapi.json."""
    answer: Callable[[StoredSession, Options], pa.Table | dict[str, Any] | Answer]
    media_type: str = "application/json"
    """Of the answer, unless it is a table and `format` is arrow or columns."""
    has_child: bool = False
    """Whether a part is computed in a child (`ServedSession`), of which there are few."""


def _flame(session: StoredSession, options: Options) -> pa.Table | dict[str, Any]:
    by = options.group
    if options.form is Form.ARROW:
        return stored.flame_graph(session, options.selection, by=by)
    total = stored.totals(session, options.selection)
    stacks = FlameStacks(session, options.selection, by, total)
    groups = stacks.groups() if by else []
    frames = [
        stacks.locations(),
        (UNKNOWN | {"kind": by, "function": name} for name in groups),
    ]
    return {
        "total": total,
        "frames": _listed(itertools.chain.from_iterable(frames)),
        "stacks": _listed(stacks.numbered(groups), _STACKS_AT_ONCE),
    }


def _listed(items: Iterable[Any], at_once: int = _ROWS_AT_ONCE) -> strict_json.Fragments:
    """A list that is made while it is written."""
    left = iter(items)
    parts = iter(lambda: list(itertools.islice(left, at_once)), [])
    return strict_json.Fragments(
        strict_json.dumps(part, separators=(",", ":"))[1:-1] for part in parts
    )


def _tree(session: StoredSession, options: Options) -> dict[str, Any]:
    weight = "bytes" if options.selection.kind in MEMORY_KINDS else "ns"
    stacks = FlameStacks(session, options.selection)
    total = stored.totals(session, options.selection)
    boxes = flame_boxes.merged_by_level(stacks, weight)
    _fit_texts(boxes)
    return {
        "unit": weight,
        "total": total[weight],
        "not_shown": total[weight] - boxes.values[0],
        "left_out": boxes.left_out,
        # Written in one piece: there are at most MAX_NODES boxes, whose texts are bounded.
        "root": strict_json.Encoded(boxes.as_json())
        if options.form is Form.JSON
        else boxes.nested(),
    }


def _fit_texts(boxes: Boxes) -> None:
    """Cut the longest texts of boxes, all to one length, until together they have TEXTS_BYTES: a
    program that makes endless names must not keep its node's flame graphs from everybody. Raises
    CaptureTooLarge where they are too long to write even so."""
    counts: Counter[str] = Counter()
    for texts, count in zip(boxes.texts, boxes.counts(), strict=True):
        for text in texts:
            counts[text] += count
    sizes = {it: len(it.encode("utf-8", "replace")) for it in counts if len(it) > SHORT_CHARS}
    if sum(size * counts[it] for it, size in sizes.items()) > TEXTS_BYTES:
        each = [size for it, size in sizes.items() for _ in range(counts[it])]
        most = max(SHORT_CHARS, common_length(each, TEXTS_BYTES))
        short = {it: cut(it, most) for it in sizes}
        boxes.texts = [
            (short.get(name, name), short.get(binary, binary), short.get(kind, kind))
            for name, binary, kind in boxes.texts
        ]
    left_bytes = ANSWER_BYTES
    for texts, count in zip(boxes.texts, boxes.counts(), strict=True):
        left_bytes -= count * sum(len(strict_json.dumps(text)) for text in texts)
        if left_bytes < 0:
            raise _too_large()


def _pprof(session: StoredSession, options: Options) -> Answer:
    from sonde.export.stored_pprof import pprof  # and with it protobuf

    selection = options.selection
    stacks = FlameStacks(session, selection, total=stored.totals(session, selection))
    rows = cast(Sequence[Mapping[str, Any]], stacks)  # it reads them once, in order
    frames = stacks.frames()
    try:
        content = pprof(selection.kind, rows, frames, selection.start_ns, selection.end_ns)
    except KeyError:
        raise UsageError(f"no profile is of kind {selection.kind!r}", "see /openapi.json") from None
    return Answer(content, "application/octet-stream")


def _timeline(session: StoredSession, options: Options) -> pa.Table | dict[str, Any]:
    selection = options.selection
    lanes, boxes = stored_views.timeline(session, selection, options.points, options.limit)
    if options.form is Form.ARROW:
        return boxes
    names = ("lane", "start", "end", "name", "n", "ns")
    shown = _shown(boxes)
    return {
        "start_ns": selection.start_ns,
        "end_ns": selection.end_ns,
        "lanes": list(stored_objects.rows(_shown(lanes), session.check)),
        "boxes": {name: _column(shown.column(name)) for name in names},
    }


def _column(column: pa.ChunkedArray) -> strict_json.Fragments:
    """The values of a column as a list that is made while it is written."""
    return strict_json.Fragments(
        strict_json.dumps(part, separators=(",", ":"))[1:-1]
        for part in stored_objects.parts_of(column)
    )


def _verdict(session: StoredSession, options: Options) -> dict[str, Any] | Answer:
    if isinstance(session, ServedSession):
        return _computed(session, "verdict", options)
    return timeline_answers.explained(session, options.selection)


def _computed(session: ServedSession, name: str, options: Options) -> Answer:
    found = session.computed(name, options.selection, options.form, ANSWER_BYTES)
    return Answer(found.content, found.media_type)


def _drawn(session: StoredSession, options: Options) -> dict[str, Any] | Answer:
    if isinstance(session, ServedSession):
        return _computed(session, "timeline", options)
    if options.form is Form.COLUMNS:
        return timeline_answers.timeline(session, options.selection, MAX_ROWS)
    answer: dict[str, Any] = packed.plain(timeline_answers.timeline(session, options.selection))
    return answer


QUESTIONS: Mapping[str, Question] = {
    "overview": Question(
        "nodes and what they did, ns of each kind of sample",
        lambda s, o: stored_views.overview(s, o.selection),
    ),
    "flamegraph": Question("stacks with their weights: frames, stacks, total", _flame),
    "flametree": Question("a flame graph as nested boxes: name, value, self, children", _tree),
    "lanes": Question("lanes of threads and devices, and the boxes in them", _timeline),
    "pprof": Question("a selection in pprof's format, gzipped", _pprof, "application/octet-stream"),
    "frames": Question(
        "code locations by key",
        lambda s, o: stored.known_frames(s),
    ),
    "totals": Question("sums of a selection", lambda s, o: stored.totals(s, o.selection)),
    "top": Question(
        "functions by own time", lambda s, o: stored.top_functions(s, o.selection, o.limit)
    ),
    "names": Question(
        "kernels, reasons of waits or calls, by weight",
        lambda s, o: stored_views.names(s, o.selection, o.limit),
    ),
    "processes": Question(
        "processes by weight", lambda s, o: stored_views.processes(s, o.selection, o.limit)
    ),
    "diff": Question(
        "functions whose share of the time changed",
        lambda s, o: stored.difference(s, o.before, o.selection, o.limit),
    ),
    "series": Question(
        "a metric over time, by node and labels",
        lambda s, o: stored.series(s, o.selection, (o.series or [""])[-1], o.points),
    ),
    "metrics": Question(
        "metrics that there are", lambda s, o: stored_views.metrics(s, o.selection)
    ),
    "nodes": Question("who sent what, and when last", lambda s, o: stored.nodes(s, o.selection)),
    "losses": Question("what agents could not observe", lambda s, o: stored.losses(s, o.selection)),
    "charts": Question(
        "several metrics, and what was observed, over time",
        lambda s, o: stored_charts.charts(s, o.selection, o.series, o.points),
    ),
    "devices": Question(
        "metrics of devices: mean, least, most, last",
        lambda s, o: stored_charts.devices(
            s, o.selection, MAX_ROWS if o.form is Form.COLUMNS else 10 * stored.MAX_ROWS
        ),
    ),
    "kernels": Question(
        "kernels by device time", lambda s, o: stored_charts.kernels(s, o.selection, o.limit)
    ),
    "timeline": Question(
        "spans of one node, its gaps with their causes, its verdict",
        _drawn,
        has_child=True,
    ),
    "ranks": Question(
        "processes on devices by step or time: at work, in collectives",
        lambda s, o: timeline_answers.ranks(s, o.selection, o.points),
        has_child=True,
    ),
    "traces": Question(
        "traced requests by observed time: on a CPU, blocked, ready",
        lambda s, o: stored_traces.traces(s, o.selection, o.limit),
    ),
    "jobs": Question(
        "jobs whose runs on devices were timed: number of ranks, and when",
        lambda s, o: stored_ranks.jobs(s, o.selection, o.limit),
    ),
    "memory": Question(
        "what processes mapped, gave back and touched, bytes",
        lambda s, o: stored_memory.memory(s, o.selection, o.limit),
    ),
    "job": Question(
        "GPU hours of one job, pod, container, unit or user: held, wasted by cause, functions",
        lambda s, o: job.job(s, o.selection, o.limit),
        has_child=True,
    ),
    "owners": Question(
        "GPU hours by owner: held, productive, stalled, idle, wasted",
        lambda s, o: job.owners(s, o.selection, o.by, o.limit),
    ),
    "holders": Question(
        "GPU hours by node and owner: who holds which node's GPUs, and wastes them",
        lambda s, o: {"by": o.by, "holders": job.holders(s, o.selection, o.by, o.limit)},
    ),
    "verdict": Question(
        "what one node's devices, or its requests and programs, waited for",
        _verdict,
        has_child=True,
    ),
}


def ask(service: Service, caller: Caller, question: Question, options: Options) -> Answer:
    """Answer a question, within its time and memory. Raises CaptureError, RefusedRequestError."""
    selection = options.selection
    if selection.trace and not any(question is QUESTIONS[name] for name in BY_TRACE):
        raise UsageError(
            "this question is not about one request", f"leave trace out, or ask {_LISTED_BY_TRACE}"
        )
    if not question.has_child:
        return _answer(service, caller, question, options)
    try:
        with service.children.place(caller.tenant, service.limits.query_s):
            return _answer(service, caller, question, options)
    except BusyError as error:
        raise RefusedRequestError(503, error.cause, error.remedy) from None


def _answer(service: Service, caller: Caller, question: Question, options: Options) -> Answer:
    selection = options.selection
    ends_s = time.monotonic() + service.limits.query_s
    if question is QUESTIONS["diff"]:
        earliest = min(selection.start_ns, options.before.start_ns)
        selection = Selection(earliest, max(selection.end_ns, options.before.end_ns))
    found, files, rows = _found(service, caller, question, options, selection, ends_s)
    return replace(written(found, options, ends_s), left_out=files, rows_left_out=rows)


def _found(
    service: Service,
    caller: Caller,
    question: Question,
    options: Options,
    selection: Selection,
    ends_s: float,
) -> tuple[pa.Table | dict[str, Any] | Answer, int, int]:
    """(the answer before it is written, numbers of damaged files that it lacks and of rows that it
    has no room for). Where the engine fails and a file of the question is found to be damaged, it
    is tried without that file. Raises CaptureError."""
    while True:
        session = service.session(caller, selection)
        try:
            with session.deadline(max(0.1, ends_s - time.monotonic())):
                found = question.answer(session, options)
            files = session.files
            damaged = files.left_out if isinstance(files, IntactPaths) else 0
            return found, damaged, session.rows_left_out
        except UnreadableStoreError:
            files = session.files
            is_less = isinstance(files, IntactPaths) and files.look()
            if not is_less or time.monotonic() > ends_s:
                raise
        finally:
            session.close()


def _shown(table: pa.Table) -> pa.Table:
    """The table with texts cut to `TEXT_CHARS`."""
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_string(field.type):
            longest = pc.max(pc.utf8_length(column)).as_py() or 0
            if longest > TEXT_CHARS:
                short = pc.utf8_slice_codeunits(column, 0, TEXT_CHARS)
                table = table.set_column(at, field, short)
    return table


def _too_large() -> CaptureTooLarge:
    return CaptureTooLarge(
        f"the answer is larger than {ANSWER_BYTES >> 20} MiB",
        "choose a shorter time or fewer nodes, or a smaller limit",
    )


class _Content:
    """Collects what is written. Raises CaptureTooLarge beyond `ANSWER_BYTES`, QueryTimedOutError
    beyond `ends_s` (monotonic)."""

    def __init__(self, ends_s: float) -> None:
        self._pieces: list[bytes] = []
        self._left_bytes = ANSWER_BYTES
        self._ends_s = ends_s

    def check(self, piece: bytes) -> None:
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            raise _too_large()
        if time.monotonic() > self._ends_s:
            raise QueryTimedOutError("the answer took too long to write", "choose a shorter time")

    def write(self, piece: bytes) -> None:
        self.check(piece)
        self._pieces.append(piece)

    def joined(self) -> bytes:
        return b"".join(self._pieces)


def _check_columns(table: pa.Table) -> None:
    """Raises CaptureTooLarge where the distinct texts of a table are too long to become objects."""
    left_bytes = ANSWER_BYTES
    for column in table.columns:
        if pa.types.is_string(column.type):
            texts = pa.chunked_array([pc.unique(column)])
            left_bytes -= int(stored_objects.text_bytes(texts).sum())
    if left_bytes < 0:
        raise _too_large()


def _some_rows(table: pa.Table) -> Iterator[list[Any]]:
    for at in range(0, table.num_rows, _ROWS_AT_ONCE):
        yield table.slice(at, _ROWS_AT_ONCE).to_pylist()


def written(
    found: pa.Table | dict[str, Any] | Answer, options: Options, ends_s: float = math.inf
) -> Answer:
    """The answer in the format that the options name. Raises CaptureError where it would be too
    large, or takes too long."""
    if isinstance(found, Answer):
        return found
    if isinstance(found, pa.Table):
        found = _shown(found)
    content = _Content(ends_s)
    if options.form is Form.ARROW and isinstance(found, pa.Table):
        if found.nbytes > ANSWER_BYTES:  # the copy that is sent would be as large
            raise _too_large()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found.schema) as writer:
            writer.write_table(found)
        return Answer(sink.getvalue().to_pybytes(), "application/vnd.apache.arrow.stream")
    if options.form is Form.COLUMNS:
        if isinstance(found, pa.Table):
            _check_columns(found)
        document = columns(found) if isinstance(found, pa.Table) else found
        return Answer(packed.encode(document, content.check), packed.MEDIA_TYPE)
    if isinstance(found, pa.Table):
        strict_json.write_rows(content.write, _some_rows(found))
    else:
        strict_json.write_compact(content.write, found)
    return Answer(content.joined(), "application/json")
