# SPDX-License-Identifier: Apache-2.0
"""`sonde record`: runs the agent with a capture file as its sink, then prints a summary."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sonde.cli.named_processes import process_name
from sonde.cli.terminal_lines import for_terminal
from sonde.errors import (
    CommandNotFound,
    MissingDependency,
    PermissionDenied,
    SinkError,
    UsageError,
)
from sonde.export.layout import duration, one_line, size

if TYPE_CHECKING:
    from sonde.agent import Agent, Live
    from sonde.cli.abort_signals import AbortOnSecondSignal
    from sonde.cli.child import Child
    from sonde.cli.pause_signals import PauseSignals
    from sonde.cli.progress import Progress
    from sonde.cli.stop_condition import StopCondition
    from sonde.config import Config

EXAMPLE = """\
examples:
  sudo sonde record                           the whole machine, until Ctrl-C
  sudo sonde record -d 30 -o slow.sonde       for 30 seconds, into slow.sonde
  sudo sonde record -p train.py               a running process and its children
  sudo sonde record -- python train.py        a program (as yourself, not root) until it ends
  sonde record -- torchrun train.py           without root: the device time of all its ranks

No program is restarted or changed; probes are removed at the end. A program after -- loads the
device-time library by its environment, and its children inherit it; a running one loads it by
`sonde attach` or --device-time. With a program after --, the exit code is the program's (128 plus
the signal that ended it, 127 if there is no such program, 126 if it cannot be run), or 1 if the
capture could not be written.
Of processes that -p names, this command and those that started it (a shell, sudo) are left out.
SIGUSR1 pauses a running recorder, SIGUSR2 resumes it.
"""

ABORTED = 130
"""Exit code after a second signal: 128 + SIGINT."""
_STOP_S = 1.0
"""How long a second signal waits for the end of the tick that is being read out."""
_LAST_CHUNK_S = 10.0
"""How long it waits for the last chunk: in a busy machine's first seconds all is named then."""
_LARGE_BYTES = 4_000_000
"""Size of a capture whose summary takes seconds."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `record` to the commands."""
    parser = subparsers.add_parser(
        "record",
        help="capture where time goes: on-CPU, waits, device calls",
        description="Record the whole machine, some processes, or one program.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sonde record [-d S] [-F HZ] [-p PID … | -- CMD …] [-o FILE] [options]",
    )
    add = parser.add_argument
    add("-d", "--duration", type=_seconds, metavar="S", help="end after S seconds")
    add("-F", "--hz", type=int, metavar="HZ", help="samples per second on each CPU (default: 99)")
    add(
        "-p",
        "--pid",
        type=process_name,
        action="extend",
        nargs="+",
        default=[],
        metavar="PID",
        dest="pids",
        help="watch these processes and their children only, by pid or by name",
    )
    add("-o", "--output", type=Path, metavar="FILE",
        help="the capture (default: sonde-DATE-TIME.sonde); - for a pipe")  # fmt: skip
    add("-f", "--force", action="store_true", help="overwrite FILE if it exists")
    add("--launches", action="store_true",
        help="record every kernel launch, too (costs about a microsecond each)")  # fmt: skip
    add("--syscalls", action="store_true",
        help="count every system call, too (costs about 0.2 microseconds each)")  # fmt: skip
    add("--memory", action="store_true",
        help="host memory by stack, too: mapped, unmapped, first touched (costs about 0.12 "
        "microseconds a page fault)")  # fmt: skip
    add("--host", action="store_true",
        help="what the machine does, too: run queues, disks, network, memory")  # fmt: skip
    add("--group-pressure", action="store_true",
        help="pressure (PSI) of control groups, too: all, or those of the processes")  # fmt: skip
    add("--traces", action="store_true",
        help="follow HTTP requests with the header traceparent (W3C): their samples and waits by "
        "trace")  # fmt: skip
    add("--no-offcpu", action="store_true", help="leave out what threads wait for")
    add("--no-device", action="store_true", help="leave out device calls and device time")
    add("--device-time", action="store_true",
        help="load the device-time library into running processes, too")  # fmt: skip
    add("--no-device-time", action="store_true", help="no library for a program after --")
    add("--json", action="store_true", help="print the result as JSON instead of the summary")
    add("-q", "--quiet", action="store_true", help="no progress, no summary")
    add("command", nargs=argparse.REMAINDER, metavar="-- CMD …", help="run a program and watch it")
    parser.set_defaults(run=run, on_abort=None)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


class _Signals(NamedTuple):
    """What signals do to a recording."""

    condition: StopCondition
    pause: PauseSignals
    abort: AbortOnSecondSignal


def run(args: argparse.Namespace) -> int:
    """Record, then print a summary. Raises SondeError where that is impossible."""
    from sonde.cli.abort_signals import AbortOnSecondSignal
    from sonde.cli.pause_signals import PauseSignals

    try:
        with PauseSignals() as pause, AbortOnSecondSignal() as abort:
            return _run(args, pause, abort)
    except CommandNotFound as error:
        from sonde.cli.named_processes import with_running

        program = next((one for one in args.command if one != "--"), "")
        raise with_running(error, program, "sonde record -p") from None


def _run(args: argparse.Namespace, pause: PauseSignals, abort: AbortOnSecondSignal) -> int:
    from sonde import procfs
    from sonde.cli.named_processes import pids_of
    from sonde.cli.own_processes import without_own
    from sonde.cli.stop_condition import StopCondition
    from sonde.host import namespaces

    procfs.BROKER.warm_up()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command and args.names_command:
        raise UsageError(
            "there is no program after --",
            "Name one: sonde record -- python train.py. For the whole machine leave out --.",
        )
    if command and args.pids:
        raise UsageError("both -p and a command were given", "Watch one or the other.")
    if args.output == Path("-"):
        args.output = _standard_output(command)
    if args.pids:
        args.pids, note = without_own(pids_of(args.pids))
        _note(args, note)
    privileged = _privileged(args, command)
    namespaces.require_matching_proc()
    path = args.output or Path(time.strftime("sonde-%Y%m%d-%H%M%S.sonde"))
    if args.on_abort is not None:
        abort.clean_up = args.on_abort
    else:
        abort.abort_message = f"; what was written until then is in {path}"
    child = _make_child(command, args)
    try:
        watched = [child.pid] if child is not None else args.pids
        with StopCondition(args.duration, args.pids, child) as condition:
            config = _config(args, watched)
            signals = _Signals(condition, pause, abort)
            return _record(args, config, path, child, signals, privileged=privileged)
    finally:
        if child is not None:
            child.abandon()


def _standard_output(command: list[str]) -> Path:
    """Where `-o -` writes. Raises UsageError where that is no place for a capture."""
    remedy = "Give -o FILE; or without a program: sonde record -d 10 -o - | sonde explain -"
    if command:
        raise UsageError("the program writes to standard output, too", remedy)
    if not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
        raise UsageError("standard output is no pipe", remedy)
    return Path("/dev/stdout")


def _privileged(args: argparse.Namespace, command: list[str]) -> bool:
    """Whether this user may load BPF programs. Where not, only device time can be recorded, and a
    note on stderr has that. Raises HostError where nothing can be recorded.
    """
    wants_device_time = _preloads_library(args) if command else bool(args.pids and args.device_time)
    from sonde.host.requirements import require_recording

    try:
        require_recording()
    except PermissionDenied as denied:
        if not wants_device_time:
            raise
        if not args.quiet:
            print(
                f"sonde: device time alone: {denied.cause}, for samples, waits and device calls\n"
                f"  remedy: {denied.remedy}",
                file=sys.stderr,
            )
        return False
    return True


def _preloads_library(args: argparse.Namespace) -> bool:
    """Whether a program after -- loads the injected library (LD_PRELOAD and the like)."""
    return not (args.no_device or args.no_device_time)


def _make_child(command: list[str], args: argparse.Namespace) -> Child | None:
    if not command:
        return None
    from sonde.attach import kill_switch, launch, library
    from sonde.cli.child import Child

    if not _preloads_library(args) or kill_switch.found_file() is not None:
        return Child(command)
    try:
        path = library.path()
    except (MissingDependency, SinkError) as error:
        print(f"sonde: no device time: {one_line(error.cause)}", file=sys.stderr)
        return Child(command)
    return Child(command, extra_environ=lambda environ: launch.variables(environ, path))


def _config(args: argparse.Namespace, watched: list[int]) -> Config:
    """The configuration, in which flags of the command line take precedence. `watched`: pids of the
    processes to record; none for the whole machine."""
    from sonde.config import load

    flags: dict[str, object] = {}
    if args.hz is not None:
        flags["hz"] = args.hz
    if watched:
        flags["pids"] = watched
    if args.launches:
        flags["launches"] = True
    if args.syscalls:
        flags["syscalls"] = True
    if args.memory:
        flags["memory"] = True
    if args.host:
        flags["host_metrics"] = True
    if args.group_pressure:
        flags["group_pressure"] = True
    if args.traces:
        flags["traces"] = True
    if args.no_offcpu:
        flags["off_cpu"] = False
    if args.no_device:
        flags |= {"device_calls": False, "device_time": "off", "injected": False}
    elif args.device_time:
        flags["device_time"] = "all"
    return load(flags)


def _record(
    args: argparse.Namespace,
    config: Config,
    path: Path,
    child: Child | None,
    signals: _Signals,
    *,
    privileged: bool,
) -> int:
    condition = signals.condition
    from sonde.agent import registry
    from sonde.cli.progress import Progress, noted_start
    from sonde.host import descriptors
    from sonde.sinks.capture import CaptureFile

    descriptors.raise_limit()  # after the fork: the child keeps the original limit
    sink = CaptureFile(path, force=args.force)
    try:
        with noted_start(sys.stderr, quiet=args.quiet):
            kernel = registry.kernel_of(config, privileged=privileged)
            from sonde.agent import Agent  # while other threads load BPF programs: it takes 0.2 s

            agent = Agent(config, sink, privileged=privileged, kernel=kernel)
            agent.start(child.program if child is not None else "")
        if child is not None:
            child.start()
    except BaseException:
        sink.discard()  # nothing was recorded
        raise

    # A rewritten progress line would mix with the output of a command.
    progress = Progress(sys.stderr, args.duration, quiet=args.quiet or child is not None)
    length = f"{args.duration:g} s of " if args.duration is not None else ""
    what = f"{length}{_subject(args, child)} at {config.hz} Hz into {path}"
    _note(args, f"recording {what}", condition)
    failure: SinkError | None = None
    try:
        condition.begin()
        signals.pause.begin(agent)
        signals.abort.patience_s = lambda: _patience_s(agent)
        failure = _observe(args, agent, condition, progress, child)
    except KeyboardInterrupt:
        progress.clear()
        sink.close()
        print(f"sonde: aborted; what was written until then is in {path}", file=sys.stderr)
        return ABORTED
    progress.clear()
    for text in agent.left_behind():
        print(f"sonde: {one_line(text)}", file=sys.stderr)
    if failure is not None and not sink.holds_chunks:
        sink.discard()
        raise failure
    _note(args, _ended(condition, child))
    if not sink.is_stream:  # a pipe cannot be read again, and nothing else may be written to it
        _print_result(args, path, agent.live(), child)
    if failure is not None:
        raise failure
    return child.run.exit_code if child is not None and child.run is not None else 0


def _patience_s(agent: Agent) -> float:
    """How long a second signal waits for the last chunk."""
    if agent.is_complete:
        return 0.0
    # The loop sees the first signal within a tick, unless it hangs.
    return _LAST_CHUNK_S if agent.is_stopping else _STOP_S


def _observe(
    args: argparse.Namespace,
    agent: Agent,
    condition: StopCondition,
    progress: Progress,
    child: Child | None,
) -> SinkError | None:
    """Record until the stop condition is met. Returns the error of a chunk that could not be
    written (a full disk); the file is kept."""
    try:
        agent.run(condition.is_met, progress.update, condition.until_s)
    except SinkError as error:
        with contextlib.suppress(SinkError):
            agent.stop()
        return error
    progress.clear()
    if condition.signals and child is None:
        _note(args, "stopping: reading what is left and removing the probes")
    try:
        agent.stop(child.run if child is not None else None)
    except SinkError as error:
        return error
    return None


def _subject(args: argparse.Namespace, child: Child | None) -> str:
    if child is not None:
        return f"{child} (pid {child.pid})"
    if args.pids:
        return f"pid {', '.join(map(str, args.pids))}"
    return "the whole machine"


def _ended(condition: StopCondition, child: Child | None) -> str:
    if child is not None and child.run is not None:
        run = child.run
        took = f"{duration(run.wall_ns)}, CPU {duration(run.user_ns)} user"
        return f"{child} {child.how_it_ended()} after {took}, {duration(run.system_ns)} system"
    if child is not None:
        return f"{child} {child.how_it_ended()}"
    return condition.reason if condition.is_unexpected else ""


def _note(args: argparse.Namespace, text: str, condition: StopCondition | None = None) -> None:
    """Print a line for people, on stderr. `condition`: of a recording that begins now."""
    if args.quiet or not text:
        return
    if condition is not None and condition.duration_s is None and not args.command:
        text += "; stop with Ctrl-C"
    print(f"sonde: {text}", file=sys.stderr)


def _print_result(args: argparse.Namespace, path: Path, live: Live, child: Child | None) -> None:
    """Print the result: JSON with --json, else the summary of the capture."""
    if args.json:
        outcome: dict[str, object] = {"file": str(path), **dataclasses.asdict(live)}
        if child is not None:
            run = dataclasses.asdict(child.run) if child.run is not None else {"status": None}
            outcome["command"] = {"argv": child.command, "pid": child.pid, **run}
        print(json.dumps(outcome, indent=2))
        return
    if args.quiet:
        return
    written = path.stat().st_size
    # Imported late: it would take memory while recording.
    try:
        from sonde.export import summary, verdict
        from sonde.query.capture import read
        from sonde.query.session import Session
        from sonde.recording import verdicts
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sonde"):
            raise
        _note(args, f"{path} is complete ({size(written)}); this installation only records")
        print(f"{path}: read it with `sonde report {path}` where {error.name} is installed")
        return
    if written >= _LARGE_BYTES:
        _note(args, f"{path} is complete ({size(written)}); summarizing it, Ctrl-C skips that")

    capture = read(path)
    before_bytes = capture.budget.held_bytes if capture.budget is not None else 0
    print(for_terminal(summary.render(Session(capture))), flush=True)
    if capture.budget is not None:  # the summary's memory is free again
        capture.budget.hold(before_bytes - capture.budget.held_bytes)
    more = f"`sonde report {path} --format html -o report.html`"
    if text := verdict.headline_or_why(verdicts.of_capture(capture)):
        print(f"\n{for_terminal(text)}")
        more = f"`sonde explain {path}`, {more}"
    print(f"\n{path}: more with {more}")
