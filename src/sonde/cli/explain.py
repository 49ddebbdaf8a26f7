# SPDX-License-Identifier: Apache-2.0
"""`sonde explain`: what limits the work, why the device stalled, and the next step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sonde.cli.named_processes import (
    MAX_PARENTS,
    Recorded,
    named_list,
    pids_in_record,
    process_name,
    processes_of,
    refuse_of_kernel,
    thread_note,
    with_running,
)
from sonde.cli.terminal_lines import for_terminal
from sonde.errors import CaptureError, MissingDependency, UsageError
from sonde.export.layout import one_line
from sonde.input_files import path_or_input

if TYPE_CHECKING:
    from sonde.analyze.bound import StallCauses
    from sonde.model.timeline import Timeline
    from sonde.recording.timelines import Record

EXAMPLE = """\
examples:
  sudo sonde explain --pid 4121               a running process, for ten seconds
  sudo sonde explain --pid train.py           the same, by its name
  sonde explain trace.json.gz                 a trace of torch.profiler
  sonde explain trace.json.gz run.sonde       the same, joined with a capture of that time
  sonde explain run.sonde --pid 4121          a process of a recording, and those it started
  sonde explain run.sonde --json | jq '.verdicts[0].bounds'
  sonde explain trace.json --steps 20         also list the first 20 steps
  sonde explain trace.json run.sonde --perfetto out.pftrace
"""


_EACH = (
    "note: each has its verdict: only a trace and a capture of its time are joined; what changed "
    "between two captures: sonde diff A B"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the commands."""
    parser = subparsers.add_parser(
        "explain",
        help="what limits the work, why the GPU stalled, and one next step",
        description="Give a verdict on recorded work: what limits it, and the cause of each stall "
        "of the device. A trace and a capture of its time are joined; any other file has its own.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", metavar="FILE", type=path_or_input, nargs="*",
        help="a capture (.sonde), a trace of torch.profiler (.json, .json.gz), Nsight Systems' "
        "SQLite export, output of `perf script`, OTLP profiles; - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "--pid",
        type=process_name,
        action="append",
        default=[],
        metavar="PID",
        dest="pids",
        help="a process, by pid or by name: of the files; without files it is recorded now; may be "
        "repeated",
    )
    parser.add_argument(
        "-d",
        "--duration",
        type=float,
        default=10.0,
        metavar="S",
        help="length of the recording (default: 10)",
    )
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT",
        help="write the timeline, with a track of causes, for ui.perfetto.dev",
    )  # fmt: skip
    parser.add_argument("--chrome", type=Path, metavar="OUT", help="the same as Chrome's JSON")
    parser.add_argument(
        "--json", action="store_true", help="JSON for scripts: times in ns, shares from 0 to 1"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no line when recording starts")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="list N steps")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain files, or a running process. Raises SondeError."""
    if not args.files and not args.pids:
        raise UsageError("give files or --pid", "sonde explain --help shows both")
    from sonde.recording.timelines import Record, open_records

    if not args.files:
        pids, threads = processes_of(args.pids)
        _note(threads)
        from sonde.host.requirements import require_recording

        require_recording()  # before it is announced
        refuse_of_kernel(pids)
        if not args.quiet:
            _note([f"recording {args.duration:g} s of {named_list(pids)}, then analysing it"])
        records = [Record(("",), _recorded(pids, args.duration))]
    else:
        # A file for another program has all threads, and so has a choice of processes.
        has_all = args.perfetto is not None or args.chrome is not None or bool(args.pids)
        try:
            found = open_records(args.files, chosen=not has_all)
        except CaptureError as error:
            raise _with_running(error, args.files) from None
        records = _chosen_of(found, args.pids)
    if len(records) > 1 and (args.perfetto is not None or args.chrome is not None):
        raise UsageError(
            "these files are not of one record: each capture has a verdict by itself, and so has a "
            "trace of another time",
            "give one of them, or a trace and a capture of the same time",
        )
    from sonde.analyze.bound import StallCauses, explain
    from sonde.export import verdict

    explained = []
    for files, timeline in records:
        causes = StallCauses(timeline)
        explanation = explain(timeline, causes)
        explained.append((headed(files, timeline), files, explanation))
        for path, module in ((args.perfetto, "perfetto"), (args.chrome, "chrome")):
            if path is not None:
                _export(timeline, causes, path, module)
    if args.json:
        documents = [(files, explanation) for _, files, explanation in explained]
        print(verdict.several_to_json(documents))
    elif len(explained) > 1:
        parts = [f"{head}\n{verdict.render(it, args.steps)}" for head, _, it in explained]
        print(for_terminal("\n\n".join([*parts, _EACH])))
    else:
        print(for_terminal(verdict.render(explained[0][2], args.steps)))
    return 0


def headed(files: Sequence[str], timeline: Timeline) -> str:
    """The line above the verdict on one of several records."""
    from sonde.export.layout import duration

    whole = {True: "whole machine", False: "chosen processes"}
    parts = [" + ".join(map(one_line, files)), duration(timeline.end_ns - timeline.start_ns)]
    if timeline.whole_machine is not None:
        parts.append(whole[timeline.whole_machine])
    return f"== {', '.join(parts)}"


def _chosen_of(records: Sequence[Record], named: Sequence[int | str]) -> list[Record]:
    """The records, each asked about the processes that are named (`_chosen`), without those that
    have none of them. Raises UsageError where no record has."""
    from sonde.recording.timelines import Record

    found, refused = [], []
    for files, timeline in records:
        try:
            found.append(Record(files, _chosen(timeline, named, files[0])))
        except UsageError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    _note([f"left out: {other.cause}" for other in refused])
    return found


def _note(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"sonde: {one_line(line)}", file=sys.stderr)


def _with_running(error: CaptureError, files: Sequence[Path]) -> CaptureError:
    """The error, with the command that asks the process that runs one of these files, if it is
    about that one."""
    for path in files:
        if error.cause.startswith(f"{path} "):
            return with_running(error, path.name, "sonde explain --pid")
    return error


def _chosen(timeline: Timeline, named: Sequence[int | str], path: str) -> Timeline:
    """The timeline, asked about these processes and those that they started; all where none is
    named. Raises UsageError for one that is not in it."""
    if not named:
        return timeline
    tracks, programs = timeline.tracks, timeline.programs
    names = {one.pid: one.process or one.name for one in reversed(tracks) if one.pid}
    names |= {one.pid: one.name for one in tracks if one.pid == one.number and one.name}
    known = {
        pid: Recorded(name, programs.get(pid, ()), timeline.parents.get(pid, 0))
        for pid, name in names.items()
    }
    threads = {one.number: one.pid for one in tracks}
    pids = set(pids_in_record(named, known, path, threads, of_threads=True))
    for tid in named:
        if isinstance(tid, int) and tid not in known:
            _note([thread_note(tid, threads[tid], known[threads[tid]].shown)])
    for pid in known:
        parents = list(islice(timeline.ancestors(pid), MAX_PARENTS))
        if not pids.isdisjoint(parents):
            pids.add(pid)
    chosen = frozenset(pids)
    beside = timeline.beside and replace(timeline.beside, chosen=chosen)
    return replace(timeline, chosen=chosen, beside=beside)


def _recorded(pids: Sequence[int], seconds: float) -> Timeline:
    """The timeline of a new recording of processes. Raises SondeError."""
    import shutil
    import signal
    import tempfile
    from functools import partial

    from sonde.cli import main
    from sonde.recording.timelines import open_timeline

    with tempfile.TemporaryDirectory(prefix="sonde-explain-") as folder:
        capture = str(Path(folder) / "live.sonde")
        command = ["record", "-p", *map(str, pids), "-d", str(seconds), "-o", capture, "--quiet"]
        recording = main.build_parser().parse_args(command)
        recording.names_command = False
        recording.on_abort = partial(shutil.rmtree, folder, ignore_errors=True)
        previous = signal.signal(signal.SIGTERM, _exit)  # the folder is removed then, too
        try:
            if recording.run(recording) != 0:
                raise CaptureError("the recording was interrupted", "try again")
            return open_timeline([Path(capture)])
        finally:
            signal.signal(signal.SIGTERM, previous)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _export(timeline: Timeline, causes: StallCauses, path: Path, module: str) -> None:
    """Write the timeline with a track of the causes of stalls; `module`: of `sonde.export`. Raises
    SinkError, MissingDependency."""
    import importlib

    try:
        exporter = importlib.import_module(f"sonde.export.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sonde":
            raise
        raise MissingDependency(
            f"the Python package {error.name} is not installed", "pip install perfetto"
        ) from error
    from sonde.private_files import replacing

    with replacing(path) as out:
        exporter.write(timeline, out, causes)
