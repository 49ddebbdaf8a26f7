# SPDX-License-Identifier: Apache-2.0
"""The child that answers a question about a timeline: a fork of fork_server.py, or `python -m …`.

Rows of a tenant decide how long that takes and how much memory, so it is done here, within limits.
Standard input: what is asked as JSON (served_session.py). Standard output: `+`, a line of JSON
(`media_type`, `rows_left_out`) and the answer, or `-` and an error as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import closing
from typing import Any

from sonde.errors import SondeError
from sonde.server.children import keep_within

EXPLAINED = "explained"
"""In place of a question's name: the verdict on the node, and its steps."""
_TRACE_CHARS = 8_000


def main() -> None:
    """`MEMORY_BYTES CPU_S`: read what is asked, write the answer."""
    keep_within(*map(int, sys.argv[1:3]))
    from sonde.server.served_session import BAD, ERRORS, GOOD

    try:
        media_type, left_out, content = answered(json.loads(sys.stdin.buffer.read()))
        head = {"media_type": media_type, "rows_left_out": left_out}
        parts = [GOOD, json.dumps(head).encode(), b"\n", content]
    except SondeError as error:
        kind = next((name for name, one in ERRORS.items() if isinstance(error, one)), "")
        parts = [BAD, _error(kind or "CaptureError", error.cause, error.remedy)]
    except Exception as error:
        if _lacks_memory(error):
            parts = [BAD, _error("MemoryError", "", "")]
        else:
            parts = [BAD, _error("", traceback.format_exc()[-_TRACE_CHARS:], "")]
    for part in parts:
        sys.stdout.buffer.write(part)


def _lacks_memory(error: Exception) -> bool:
    """Whether an error is that of the limit: also of the engine's start, or of a thread's."""
    is_of_engine = type(error).__name__ == "OutOfMemoryException"
    return isinstance(error, MemoryError) or is_of_engine or "start new thread" in str(error)


def _error(kind: str, cause: str, remedy: str) -> bytes:
    return json.dumps({"kind": kind, "error": cause, "remedy": remedy}).encode()


def answered(asked: dict[str, Any]) -> tuple[str, int, bytes]:
    """(media type, rows that it has no room for, the answer). Raises CaptureError."""
    from dataclasses import replace
    from pathlib import Path

    from sonde.query.selection import Selection
    from sonde.query.stored_session import StoredSession
    from sonde.server import answers, timeline_answers
    from sonde.server.parameters import Form, parse

    selection = Selection(asked["start_ns"], asked["end_ns"], nodes=asked["nodes"])
    options = replace(parse(()), selection=selection, form=Form(asked["form"]))
    session = StoredSession(
        [Path(one) for one in asked["allowed"]],
        {name: [Path(one) for one in paths] for name, paths in asked["files"].items()},
        asked["memory_bytes"],
        Path(asked["spill"]),
    )
    ends_s = asked["ends_s"]
    with closing(session), session.deadline(max(0.1, ends_s - time.monotonic())):
        if asked["name"] == EXPLAINED:
            found: Any = timeline_answers.explained_with_steps(session, selection)
        else:
            found = answers.QUESTIONS[asked["name"]].answer(session, options)
        answer = answers.written(found, options, ends_s)
    return answer.media_type, session.rows_left_out, answer.content


if __name__ == "__main__":
    main()
