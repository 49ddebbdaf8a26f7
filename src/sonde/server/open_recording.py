# SPDX-License-Identifier: Apache-2.0
"""The child that reads a file given to the page: a fork of fork_server.py, or `python -m …`.

Such a file is not trusted. It is read by the readers of `sonde explain`, in a separate process with
limits for memory and CPU time, which is killed when it takes too long; its answer has numbers and
text only. Standard input: the file. Standard output: `+` and the packed document
(export/packed.py), or `-` and an error as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import CaptureTooLarge, SondeError
from sonde.limits import VARIABLE
from sonde.server.children import keep_within

if TYPE_CHECKING:
    from sonde.model.profile import Profile
    from sonde.query.capture import Capture

GOOD, BAD = b"+", b"-"
"""The first byte of the answer."""
ERROR_BYTES = 64 << 10
"""Room for an error, and for what comes before the document."""
_MAX_STACKS = 200_000
"""Stacks of one kind that are sent, those with most time or bytes (or events, of a kind that has
only these); `total` sums up the others, too."""
_SHOWN = ("cpu", "blocked", "runqueue", "device", "kernel", "mapped")
"""Kinds of samples that the page draws as flame graphs."""


def main() -> None:
    """`MEMORY_BYTES CPU_S ANSWER_BYTES`: read the file, write the answer."""
    memory_bytes, cpu_s, answer_bytes = map(int, sys.argv[1:4])
    keep_within(memory_bytes, cpu_s)
    # What may be read; the rest of the memory is for what is made of it: tables, timeline, answer.
    os.environ[VARIABLE] = str(memory_bytes // 4)
    path = Path("/proc/self/fd/0")
    try:
        from sonde.export import packed

        left_bytes = answer_bytes

        def check(piece: bytes) -> None:
            nonlocal left_bytes
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise _too_large(answer_bytes)

        content = packed.encode(document(path), check)
        if len(content) > answer_bytes:
            raise _too_large(answer_bytes)
        answer = GOOD + content
    except SondeError as error:
        answer = _refusal(error.cause.replace(str(path), "the file"), error.remedy)
    except MemoryError:
        answer = _refusal(
            "the file takes too much memory to read", "`sonde explain` on your machine takes more"
        )
    except Exception as error:  # a defect of a reader, which the file has found
        answer = _refusal(
            f"the file cannot be read ({type(error).__name__})",
            "report it with the output of `SONDE_DEBUG=1 sonde explain FILE`",
        )
    sys.stdout.buffer.write(answer)


def _too_large(answer_bytes: int) -> CaptureTooLarge:
    return CaptureTooLarge(
        f"what the page shows of the file has more than {answer_bytes / 1e6:,.1f} MB",
        "read answers that are still on their way first; `sonde explain FILE` and"
        " `sonde report FILE` on your machine have no such limit",
    )


def _refusal(cause: str, remedy: str) -> bytes:
    return BAD + json.dumps({"error": cause, "remedy": remedy}).encode()


def document(path: Path) -> dict[str, Any]:
    """What the page shows of a file: `timeline`, and `flames` by kind. Raises SondeError."""
    from sonde.analyze.bound import StallCauses, explain
    from sonde.export import timeline_columns, verdict
    from sonde.query.framing import FILE_NAME
    from sonde.query.stored_capture import MAX_ROWS
    from sonde.recording.timelines import open_timeline, timeline_of

    with path.open("rb") as file:
        is_capture = file.read(len(FILE_NAME)) == FILE_NAME
    capture = _capture(path) if is_capture else None
    found = timeline_of(capture) if capture else open_timeline([path])
    begin = found.start_ns
    causes = StallCauses(found)
    explanation = explain(found, causes)
    drawn = timeline_columns.document(found, causes, _runs(capture), begin, MAX_ROWS)
    drawn["steps"] = timeline_columns.steps(explanation, begin)
    drawn["origin_ns"] += capture.info.wall_offset_ns if capture else 0
    drawn["explanation"] = verdict.document(explanation)
    return {"timeline": drawn, "flames": _flames(capture) if capture else {}}


def _capture(path: Path) -> Capture:
    from sonde.query.capture import read

    return read(path)


def _runs(capture: Capture | None) -> Any:
    from sonde.query.run_columns import no_runs, run_columns

    return run_columns(capture) if capture else no_runs()


def _flames(capture: Capture) -> dict[str, Any]:
    """By kind of sample that the capture has: what the question `flamegraph` answers."""
    from sonde.model.profile import ProfileKind
    from sonde.query import queries
    from sonde.query.session import Session

    session = Session(capture)
    kinds = [kind for kind in ProfileKind if kind.column_value in _SHOWN]
    profiles = {kind.column_value: queries.profile(session, kind) for kind in kinds}
    return {name: _flame(profile) for name, profile in profiles.items() if len(profile)}


def _flame(profile: Profile) -> dict[str, Any]:
    from sonde.export.stack_frames import leaf_label

    numbers: dict[tuple[str, str, str, str, int], int] = {}
    merged: dict[tuple[int, str], list[float]] = {}
    for row in profile:
        weights = merged.setdefault((row.stack, leaf_label(profile, row)), [0, 0, 0])
        for at, amount in enumerate((row.events, row.ns, row.bytes)):
            weights[at] += amount
    # A kind has time or bytes, not both; events decide where it has neither.
    heaviest = sorted(merged.items(), key=lambda one: (-one[1][1] - one[1][2], -one[1][0]))
    stacks = []
    for (stack, label), (events, ns, size) in heaviest[:_MAX_STACKS]:
        frames = profile.stacks[stack]
        keys = [(one.kind, one.function, one.binary, one.file, one.line) for one in frames]
        if label:
            keys.insert(0, ("call", label, "", "", 0))
        indices = [numbers.setdefault(key, len(numbers)) for key in keys]
        stacks.append({"frames": indices, "n": events, "ns": ns, "bytes": size})
    names = ("kind", "function", "binary", "file", "line")
    total = [sum(one[at] for one in merged.values()) for at in range(3)]
    return {
        "total": {"rows": len(merged), "n": total[0], "ns": total[1], "bytes": total[2]},
        "frames": [dict(zip(names, key, strict=True)) for key in numbers],
        "stacks": stacks,
    }


if __name__ == "__main__":
    main()
