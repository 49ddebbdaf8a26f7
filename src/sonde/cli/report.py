# SPDX-License-Identifier: Apache-2.0
"""`sonde report`: a capture as a flame graph, as tables, or in the format of another tool."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import io
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sonde.cli.named_processes import Recorded, pids_in_record, process_name, with_running
from sonde.cli.terminal_lines import for_terminal
from sonde.errors import CaptureError, MissingDependency, SinkError, UsageError
from sonde.export.layout import one_line
from sonde.input_files import path_or_input
from sonde.model.code import Hide
from sonde.model.profile import ProfileKind
from sonde.model.verdict import Explained

if TYPE_CHECKING:
    from sonde.query.capture import Capture
    from sonde.query.queries import Where
    from sonde.query.session import Session

EXAMPLE = """\
formats:
  table       processes, functions, waits, GPU API calls, losses (the default)
  summary     one screen, as `sonde record` prints it
  html        one self-contained page with an interactive flame graph; opens without a network
  flamegraph  the same as html
  pprof       for `go tool pprof`; show waits with -sample_index=off_cpu
  folded      folded stacks for FlameGraph's scripts: CPU samples, bytes, or microseconds
  speedscope  for https://www.speedscope.app
  json        everything, for scripts; times in ns

metrics:
  on-cpu          time on a CPU
  off-cpu         time blocked, by reason: lock, I/O, sleep
  run-queue       time runnable, waiting for a CPU
  gpu-calls       host time inside GPU API calls, and the bytes that they move
  gpu-time        time on the GPU, under the host stack that launched the work
  memory-mapped   bytes mapped by mmap and brk
  memory-faulted  bytes brought in by page faults: memory touched for the first time
  memory-held     bytes mapped and not unmapped by the end of the recording

frames that --hide leaves out, as the server's page does:
  kernel      those of the Linux kernel
  runtime     those, and those of libc, libpthread, ld.so, libstdc++, libgcc, CPython, the vdso
  native      all but Python's
  A stack with no frame left counts under [hidden]: sums stay the same.

examples:
  sonde report run.sonde
  sonde report run.sonde --format flamegraph            writes run.html
  sonde report run.sonde --format html --metric off-cpu --pid 4211 -o waits.html
  sonde report run.sonde --format pprof > run.pb.gz     a pipe or a file gets every format
  sonde report run.sonde --format html --hide native    Python alone
  ssh node cat run.sonde | sonde report - --format folded
  sonde report run.sonde --format pprof --lines          with inlined functions and source lines
  sonde report run.sonde --format json | jq '.device_calls[] | {function, calls, bytes}'
"""

_NEW_OBJECTS = 100_000
"""Objects made between two collections of garbage; the interpreter's default is 700."""


@dataclass(frozen=True, slots=True)
class _Format:
    module: str
    """Of `sonde.export`."""
    suffix: str = ""
    """Of the file that is written by default; '' for standard output."""
    default_kinds: tuple[ProfileKind, ...] | None = None
    """What is shown where --metric names none; None: all that was recorded."""
    has_verdict: bool = False
    has_lengths: bool = False
    """It shows how long single waits are."""

    @property
    def unused_tables(self) -> tuple[str, ...]:
        """What need not be read for it."""
        return () if self.has_lengths else _SPANS


_HTML = _Format("html", ".html", has_verdict=True)
_FORMATS = {
    "table": _Format("table"),
    "summary": _Format("summary", has_verdict=True, has_lengths=True),
    "html": _HTML,
    "flamegraph": _HTML,
    "pprof": _Format("pprof", ".pb.gz"),
    "folded": _Format("folded", default_kinds=(ProfileKind.ON_CPU,)),
    "speedscope": _Format("speedscope", ".speedscope.json"),
    "json": _Format("json_report", has_lengths=True),
}
_FORMER_METRIC_NAMES = {
    "cpu": ProfileKind.ON_CPU,
    "offcpu": ProfileKind.OFF_CPU,
    "runqueue": ProfileKind.RUN_QUEUE,
    "device": ProfileKind.GPU_TIME,
    "device-calls": ProfileKind.GPU_CALLS,
    "mapped": ProfileKind.MEMORY_MAPPED,
    "faulted": ProfileKind.MEMORY_FAULTED,
    "held": ProfileKind.MEMORY_HELD,
}
"""Older names of metrics, accepted for scripts that have them; not in the help."""

_SPANS = ("span",)
"""Single intervals, a third of a capture: few formats show how long single waits are."""
_PROGRESS_AFTER_S = 1.0
"""Reading that takes longer shows a bar."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the commands."""
    parser = subparsers.add_parser(
        "report",
        help="a capture as flame graph, tables, pprof, speedscope, JSON",
        description="Show a capture. Needs no privileges and no network.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", type=path_or_input, help="a capture (.sonde); - for standard input"
    )
    parser.add_argument("--format", choices=_FORMATS, default="table", help="see below")
    parser.add_argument(
        "--metric",
        type=_metric,
        choices=[kind.value for kind in ProfileKind],
        help="what to show, see below (default: all that were recorded; folded: on-cpu)",
    )
    parser.add_argument(
        "--pid",
        type=process_name,
        action="append",
        default=[],
        help="only this process, by pid or by name; may be repeated",
    )
    parser.add_argument(
        "--from",
        dest="from_s",
        metavar="S",
        type=_seconds,
        help="from this second of the recording",
    )
    parser.add_argument(
        "--to", dest="to_s", metavar="S", type=_seconds, help="up to this second of the recording"
    )
    parser.add_argument(
        "--limit", metavar="N", type=_whole, help="rows of each table (default 30; 0: all)"
    )
    parser.add_argument(
        "--hide", choices=[hide.value for hide in Hide], help="frames to leave out, see below"
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="source lines and inlined functions, from the debug data of the programs that ran "
        "here, and of /usr/lib/debug",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="where to write; - for standard output (default: standard output; of html, pprof and "
        "speedscope, where that is a terminal, FILE with another suffix)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report. Raises UsageError, CaptureError, SinkError, MissingDependency."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, 50, 100)  # a million rows and nodes, none in a reference cycle
    try:
        return _report(args)
    finally:
        gc.set_threshold(*before)


def _report(args: argparse.Namespace) -> int:
    chosen = _FORMATS[args.format]
    if args.limit is not None and args.format != "table":
        raise UsageError("--limit is for tables", "leave it out, or use --format table")
    if args.hide and args.format == "summary":
        raise UsageError(
            "--hide is for stacks, of which a summary has none",
            "leave it out, or choose another format: --format table",
        )
    output = _output(args, chosen)
    explained: Explained | None = None
    try:
        if chosen.has_verdict:
            capture, explained = _explained(args, chosen.unused_tables)
            _return_free_memory()
        else:
            capture = _read(args.file, chosen.unused_tables)
        session = _opened(capture, args.lines, Hide(args.hide) if args.hide else None)
        del capture  # its stacks take a tenth of a report's memory; the session has its own
        exporter = importlib.import_module(f"sonde.export.{chosen.module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sonde"):
            raise
        raise MissingDependency(
            f"the Python package {error.name} is missing", "run: pip install --upgrade sonde"
        ) from error
    kinds = (ProfileKind(args.metric),) if args.metric else _recorded_kinds(session, chosen)
    more: dict[str, Any] = {} if args.limit is None else {"limit": args.limit}
    if chosen.has_verdict:
        more["explained"] = explained
    write = partial(exporter.write, session, kinds=kinds, where=_where(args, session), **more)
    if output is None:
        _to_standard_output(partial(_in_lines, write) if args.format == "summary" else write)
        return 0
    from sonde.private_files import replacing

    with replacing(output) as out:
        write(out=out)
    print(one_line(str(output)), file=sys.stderr)
    return 0


def _recorded_kinds(session: Session, chosen: _Format) -> tuple[ProfileKind, ...]:
    """The kinds to show where --metric names none."""
    from sonde.query.device_runs import kinds_seen

    return kinds_seen(session) if chosen.default_kinds is None else chosen.default_kinds


def _output(args: argparse.Namespace, chosen: _Format) -> Path | None:
    """The file to write, None for standard output."""
    from sonde.input_files import own_descriptor

    piped = own_descriptor(args.file) is not None or _is_taken()
    if args.output == "-" or (args.output is None and (piped or not chosen.suffix)):
        if chosen.suffix and sys.stdout.isatty():
            is_binary = chosen.suffix == ".pb.gz"
            what = (
                "a pprof profile is binary" if is_binary else f"{args.format} is for other programs"
            )
            raise UsageError(f"{what}: not for a terminal", "name a file with -o, or pipe it")
        return None
    output: Path = Path(args.output) if args.output else args.file.with_suffix(chosen.suffix)
    with contextlib.suppress(OSError):
        if output.samefile(args.file):
            raise UsageError(f"{output} is the capture itself", "name another file with -o")
    return output


def _is_taken() -> bool:
    """Whether standard output is a pipe or a file: then somebody wants there what is written."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):  # closed, or none of the system's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _explained(args: argparse.Namespace, unused: Collection[str]) -> tuple[Capture, Explained]:
    """The capture without the tables `unused`, and the verdict on it: that is of whole captures."""
    from sonde.query.schema import TABLES
    from sonde.recording import verdicts
    from sonde.recording.large_captures import read_for_verdict

    missing, command = "", verdicts.command_for(args.file)
    if args.pid or args.from_s is not None or args.to_s is not None:
        missing = "this is a part of the capture"
        capture = _read(args.file, unused)
        if command:
            command += "".join(f" --pid {shlex.quote(str(one))}" for one in args.pid or ())
    else:
        capture = read_for_verdict(args.file, _read) if unused else _read(args.file, unused)
    explained = Explained(None, missing, command) if missing else verdicts.of_capture(capture)
    if explained.explanation is not None:
        explained = dataclasses.replace(explained, command=command)
    empty = {name: TABLES[name].empty_table() for name in unused}
    return dataclasses.replace(capture, tables=capture.tables | empty), explained


def _return_free_memory() -> None:
    """Give the system what a verdict needed and freed: glibc would keep a fifth of a report's
    memory, in pieces that do not fit what comes next."""
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def _opened(capture: Capture, lines: bool, hide: Hide | None) -> Session:
    from sonde.query.session import Session

    return Session(_with_lines(capture) if lines else capture, hide)


def _read(path: Path, unused: Collection[str]) -> Capture:
    import pyarrow

    from sonde.query.capture import read

    # The system's allocator frees memory at once; Arrow's default keeps a fifth of what a report
    # needs.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    began = time.monotonic()
    shown = False

    def on_progress(done: int, whole: int) -> None:
        nonlocal shown
        if time.monotonic() - began > _PROGRESS_AFTER_S and sys.stderr.isatty():
            filled = 24 * done // whole
            bar = "█" * filled + "░" * (24 - filled)
            print(f"\rreading {bar} {100 * done // whole:3} %", end="", file=sys.stderr, flush=True)
            shown = True

    try:
        return read(path, on_progress, unused)
    except CaptureError as error:
        if error.cause == f"{path} does not exist":
            raise with_running(error, path.name, "sonde record -p") from None
        raise
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _with_lines(capture: Capture) -> Capture:
    """The capture with source lines and inlined functions, of programs whose debug data is here."""
    from sonde.query import inlined
    from sonde.resolve.source_lines import look_up

    found = look_up(inlined.offsets_without_line(capture.tables))
    failed = f", {found.failed} could not be read in time" if found.failed else ""
    text = f"source lines of {found.files} files; {found.not_found} are not here{failed}"
    if not found.files and not found.not_found and not failed:
        text = "all code in it has its lines already, or none that could be looked up"
    print(f"sonde: {text}", file=sys.stderr)
    tables = inlined.with_lines(capture.tables, found.locations)
    return dataclasses.replace(capture, tables=tables)


def _where(args: argparse.Namespace, session: Session) -> Where:
    from sonde.query.queries import Where

    known = {
        one.pid: Recorded(one.name, (one.comm, one.exe), one.ppid)
        for one in (session.processes if args.pid else ())
    }
    threads = {one.tid: one.process.pid for one in session.threads} if args.pid else {}
    pids = pids_in_record(args.pid, known, str(args.file), threads)
    info = session.info
    start_ns = None if args.from_s is None else info.start_ns + round(args.from_s * 1e9)
    end_ns = None if args.to_s is None else info.start_ns + round(args.to_s * 1e9)
    if max(start_ns or 0, info.start_ns) >= min(end_ns or info.end_ns, info.end_ns):
        raise UsageError(
            "--from and --to leave nothing of the recording",
            f"choose a range within its {info.duration_ns / 1e9:.1f} s",
        )
    return Where(pids=pids, start_ns=start_ns, end_ns=end_ns)


def _in_lines(write: Callable[..., None], out: BinaryIO) -> None:
    """Write a text as lines that fit the terminal."""
    text = io.BytesIO()
    write(out=text)
    out.write(for_terminal(text.getvalue().decode()).encode())


def _to_standard_output(write: Callable[..., None]) -> None:
    try:
        write(out=sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SinkError(
            f"cannot write to standard output: {error.strerror or error}", "write to a file with -o"
        ) from error


def _metric(text: str) -> str:
    """The present name of a metric; unknown text is returned as it is, for argparse to refuse."""
    kind = _FORMER_METRIC_NAMES.get(text)
    return kind.value if kind else text


def _whole(text: str) -> int:
    """A whole number below 2^31."""
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
