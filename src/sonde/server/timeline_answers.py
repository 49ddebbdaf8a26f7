# SPDX-License-Identifier: Apache-2.0
"""Answers that need a whole timeline of one node: its spans, its verdict, its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sonde.analyze.bound import StallCauses, explain
from sonde.errors import CaptureTooLarge
from sonde.export import timeline_columns, verdict
from sonde.model.verdict import Explanation
from sonde.query.run_columns import run_columns
from sonde.query.selection import Selection
from sonde.query.stored_capture import capture_of
from sonde.query.stored_ranks import MAX_BINS, BinKind, TimeBin, bins_of, observed, timed_whole
from sonde.query.stored_ranks import ranks as ranks_in
from sonde.query.stored_session import StoredSession
from sonde.recording.timelines import timeline_of
from sonde.server.served_session import ServedSession

MAX_BYTES = 64 << 20
"""Of what a child answers."""
_MIN_STEPS = 4
"""With fewer steps a heat map has parts of the time as columns."""
_MAX_RANGE_S = 120
"""The longest time in which steps are looked for: all rows of a node are read for that."""


def explained(session: StoredSession, selection: Selection) -> dict[str, Any]:
    """The verdict on one node, as `sonde explain --json`. Raises CaptureError."""
    if isinstance(session, ServedSession):
        found_there: dict[str, Any] = session.explained(selection, MAX_BYTES)["verdict"]
        return found_there
    return verdict.document(_explanation(session, selection))


def explained_with_steps(session: StoredSession, selection: Selection) -> dict[str, Any]:
    """`verdict` (as `explained`) and `steps` (as `steps`) of one node. Raises CaptureError."""
    found = _explanation(session, selection)
    return {"verdict": verdict.document(found), "steps": _steps_of(found)}


def _explanation(session: StoredSession, selection: Selection) -> Explanation:
    found = timeline_of(capture_of(session, selection))
    session.check()
    explanation = explain(found)
    session.check()
    return explanation


def timeline(
    session: StoredSession, selection: Selection, most_spans: int = timeline_columns.MAX_SPANS
) -> dict[str, Any]:
    """The spans of one node and its verdict, in columns (arrays); times in ns after `origin_ns`.

    `most_spans`: of each table; the longest are kept. Raises CaptureError.
    """
    capture = capture_of(session, selection)
    found = timeline_of(capture)
    session.check()
    causes = StallCauses(found)
    explanation = explain(found, causes)
    session.check()
    drawn = timeline_columns.document(
        found, causes, run_columns(capture), selection.start_ns, most_spans
    )
    session.check()
    drawn["steps"] = timeline_columns.steps(explanation, selection.start_ns)
    return drawn | {"explanation": verdict.document(explanation)}


def ranks(
    session: StoredSession, selection: Selection, points: int, most: int = 0
) -> dict[str, Any]:
    """Ranks by the steps of a node where every run was timed, or by time where none are known.

    Columns lie in the parts of the selected time in which runs were timed, so that any time which
    contains the same runs has the same ones: what was recorded for seconds is not one column of a
    week. `points`: of columns that are no steps, at most.

    Ranks of a job that exchange data in each step have their steps at the same time, as far as the
    clocks of their nodes agree. Raises CaptureError.
    """
    pieces = observed(session, selection, points)
    slots = _steps(session, _around(selection, pieces)) if pieces else []
    if slots:
        return ranks_in(session, selection, slots, BinKind.STEPS, most)
    return ranks_in(session, selection, bins_of(pieces, points), BinKind.TIME, most)


def _around(selection: Selection, pieces: Sequence[Selection]) -> Selection:
    """The selected time from a second before the first piece to a second after the last: other rows
    of a capture are kept by the second."""
    begin, end = pieces[0].start_ns - 10**9, pieces[-1].end_ns + 10**9
    return replace(
        selection, start_ns=max(selection.start_ns, begin), end_ns=min(selection.end_ns, end)
    )


def _steps(session: StoredSession, selection: Selection) -> list[TimeBin]:
    """The steps of one node; [] where they are not known, too few or too many."""
    if selection.end_ns - selection.start_ns > _MAX_RANGE_S * 10**9:
        return []
    node = timed_whole(session, selection)
    if not node:
        return []
    try:
        pairs = steps(session, replace(selection, nodes=[node]))
    except CaptureTooLarge:
        return []
    return [TimeBin(start_ns, end_ns) for start_ns, end_ns in pairs]


def steps(session: StoredSession, selection: Selection) -> list[tuple[int, int]]:
    """(start, end) in ns of each step of the node; [] where they are too few or too many. Raises
    CaptureError."""
    if isinstance(session, ServedSession):
        pairs = session.explained(selection, MAX_BYTES)["steps"]
        return [(start_ns, end_ns) for start_ns, end_ns in pairs]
    return _steps_of(_explanation(session, selection))


def _steps_of(explanation: Explanation) -> list[tuple[int, int]]:
    for one in explanation.verdicts:
        table = one.steps
        if table is not None and _MIN_STEPS <= table.count <= MAX_BINS:
            pairs = zip(table.start_ns, table.duration_ns, strict=True)
            return [(int(start), int(start) + max(1, int(ns))) for start, ns in pairs]
    return []
