# SPDX-License-Identifier: Apache-2.0
"""`sonde incidents`: prints what `sonde diagnose --keep` wrote, or explains it again."""

from __future__ import annotations

import argparse
import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureError, UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.diagnose.early import EarlyWarning
    from sonde.diagnose.incident import Incident, Verdict
    from sonde.diagnose.moments import Window

EXAMPLE = """\
examples:
  sonde incidents incidents.d            every incident of a folder
  sonde incidents one.json.gz --json     one of them, as a line of JSON
  sonde incidents incidents.d --explain  explained again from the rows, by this version's rules
"""
MAX_BYTES = 64 << 20
"""Of one incident, unpacked."""
SUFFIX = ".json.gz"
LEAST_SLOWDOWN = 1.05
"""Of less it does as much as before, later."""
NO_WAITS = frozenset(("cpu", "queue", "sleep"))
"""Parts of a verdict's `lost` that are no waits."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `incidents` to the commands."""
    parser = subparsers.add_parser(
        "incidents",
        help="incidents that were kept: cause, offender, evidence",
        description="Print incidents that `sonde diagnose --keep` wrote.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders of them")
    add("--json", action="store_true", help="a line of JSON each")
    add("--explain", action="store_true", help="explain the rows again, by this version's rules")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print incidents: files in the order given, those of a folder by name, so the oldest first.
    Raises UsageError for a folder without any, CaptureError for what cannot be read."""
    import msgspec

    from sonde.diagnose.explain import explain

    for path in _files(args.paths):
        incident, window = read(path)
        if args.explain:
            verdict = explain(window, is_last_look=True)
            if verdict is None:
                raise CaptureError(
                    f"{path} shows no stall to this version", "Print it without --explain."
                )
            incident = msgspec.structs.replace(incident, verdict=verdict)
        print(as_json(incident) if args.json else as_text(incident))
    return 0


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise UsageError(
                f"no incidents in {path}", "`sonde diagnose --keep FOLDER` writes some."
            )
        yield from found


def read(path: Path) -> tuple[Incident, Window]:
    """An incident and the window that it was explained by. Raises CaptureError."""
    import msgspec

    from sonde.diagnose.recorded import Recorded
    from sonde.input_files import open_input

    try:
        with open_input(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            raw = unpacked.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise CaptureError(f"{path} is larger than {MAX_BYTES:,} bytes unpacked")
        recorded = msgspec.json.decode(raw, type=Recorded)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise CaptureError(
            f"{path} holds no incident: {error}", "Name a file of `sonde diagnose --keep`."
        ) from error
    return recorded.incident, recorded.window


def write(folder: Path, name: str, incident: Incident, window: Window) -> None:
    """Write an incident and its window to a file. Raises SinkError."""
    import msgspec

    from sonde.diagnose.recorded import Recorded, shrunk
    from sonde.private_files import make_folder, replacing

    offset_ns = time.time_ns() - time.monotonic_ns()
    raw = msgspec.json.encode(
        Recorded(1, incident, shrunk(window), socket.gethostname(), offset_ns)
    )
    make_folder(folder)
    with replacing(folder / name) as file:
        file.write(gzip.compress(raw, 6, mtime=0))


def as_json(incident: Incident) -> str:
    """An incident as one line of JSON."""
    import msgspec

    plain = msgspec.to_builtins(incident)
    plain["verdict"]["cause"] = str(incident.verdict.cause)
    return json.dumps(plain)


def warning_as_json(warning: EarlyWarning) -> str:
    """A warning as one line of JSON."""
    import msgspec

    return json.dumps({"warning": msgspec.to_builtins(warning)})


def warning_as_text(warning: EarlyWarning) -> str:
    """One line: which level, how near its limit, when it will reach it."""
    share = warning.level / warning.limit
    text = f"early warning: {warning.sign} of {warning.subject} is at {share:.0%} of its limit"
    return one_line(f"{text}, and reaches it in {warning.lead_s:.0f} s if it goes on so")


def as_text(incident: Incident) -> str:
    """A few lines: the victim, and for each of the three likeliest causes the offender and the
    evidence; the next step for the likeliest."""
    verdict = incident.verdict
    found_s = (incident.noticed_ns - incident.began_ns) / 1e9
    explained_s = (incident.explained_ns - incident.noticed_ns) / 1e9
    head = f"{incident.victim_name} ({incident.victim})"
    if incident.victim_owner:
        head += f" of {incident.victim_owner}"
    lines = [
        f"{head}: {_summary(verdict)}",
        f"  noticed after {found_s:.1f} s by {', '.join(incident.noticed_by)}, explained "
        f"{explained_s:.1f} s later",
    ]
    for number, candidate in enumerate(verdict.candidates[:3]):
        if number:
            lines.append(f"  or {candidate.cause} ({candidate.share:.0%} of the lost time)")
        if (who := candidate.offender) is not None:
            owner = f" of {who.owner}" if who.owner else ""
            lines.append(f"    by {who.name} ({who.pid}){owner}: {who.evidence}")
        lines += [f"    {text}" for text in candidate.evidence]
        lines += [f"    against: {text}" for text in candidate.against]
        if candidate.next_step and not number:
            lines.append(f"    next: {candidate.next_step}")
    if incident.left_out:
        lines.append(f"  left out: {incident.left_out:,} of its shortest waits and places in code")
    lines += _of_ranks(verdict)
    return "\n".join(one_line(line) for line in lines)


def _of_ranks(verdict: Verdict) -> list[str]:
    """Every rank of a stalled job; of those that are missing, the stack."""
    lines = []
    for one in verdict.ranks:
        at = f", in {one.line}" if one.line else ""
        lines.append(
            f"  rank {one.rank} ({one.pid}): {one.doing}{at}{one.failed and ': '}{one.failed}"
        )
        if one.is_missing:
            lines += [f"      {text}" for text in one.stack]
    return lines


def _summary(verdict: Verdict) -> str:
    if verdict.change is not None:
        return f"no fault: {verdict.change}, {verdict.reason}"
    first = verdict.candidates[0]
    if verdict.ranks:
        return f"its job makes no progress: {first.cause}"
    waits_s = sum(s for part, s in verdict.lost.items() if part not in NO_WAITS)
    slower = f"waits {waits_s:.2f} s more of each second"
    if verdict.slowdown > LEAST_SLOWDOWN:
        slower = f"{verdict.slowdown:.1f} times as slow"
    return f"{slower}: {first.cause} ({first.share:.0%} of the lost time)"
