# SPDX-License-Identifier: Apache-2.0
"""Answers that need a whole timeline of one node: its spans, its verdict."""

from __future__ import annotations

from typing import Any

from sonde.analyze.bound import causes_of, explain
from sonde.analyze.merge import merged, with_interpreter_lock
from sonde.export import timeline_columns, verdict
from sonde.model.timeline import Timeline
from sonde.query.capture import Capture
from sonde.query.stored import Selection, StoredSession
from sonde.query.stored_capture import capture_of, run_columns
from sonde.query.timeline import of_capture


def _timeline(capture: Capture) -> Timeline:
    return with_interpreter_lock(merged(of_capture(capture)))


def explained(session: StoredSession, wanted: Selection) -> dict[str, Any]:
    """The verdict on one node, as `sonde explain --json`. Raises CaptureError."""
    return verdict.document(explain(_timeline(capture_of(session, wanted))))


def timeline(
    session: StoredSession, wanted: Selection, most_spans: int = timeline_columns.MOST_SPANS
) -> dict[str, Any]:
    """The spans of one node and its verdict, in columns (arrays); times in ns after `origin_ns`.

    `most_spans`: of each table; the longest are kept. Raises CaptureError.
    """
    capture = capture_of(session, wanted)
    found = _timeline(capture)
    drawn = timeline_columns.document(
        found, causes_of(found), run_columns(capture), wanted.start_ns, most_spans
    )
    return drawn | {"explanation": verdict.document(explain(found))}
