# SPDX-License-Identifier: Apache-2.0
"""`sonde trace PID`: every kernel, copy and call of a running process, for a second."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sonde.cli import trace_price
from sonde.cli.named_processes import pid_of, process_name
from sonde.errors import HostError, UsageError

if TYPE_CHECKING:
    from sonde.analyze.replay_kernels import ReplayKernel
    from sonde.attach.cupti_builds import Build
    from sonde.cli.trace_price import Price
    from sonde.model.device_trace import DeviceTrace, RawTrace
    from sonde.model.launches import LaunchRates

EXAMPLE = """\
examples:
  sonde trace 4711 --dry-run               what it would cost, and whether it is refused
  sudo sonde trace 4711                    one second: a timeline, stacks, and a verdict
  sudo sonde trace 4711 -d 0.2 -o x.json.gz
  sonde explain x.json.gz x.sonde          the verdict again

The timeline (Chrome's JSON, for ui.perfetto.dev) holds every kernel, also those within replayed
CUDA graphs, and every copy, set and call of the CUDA runtime. CUPTI, which the process must have
loaded itself, slows it while it is traced, and somewhat until it ends: the highest price is printed
before anything is touched, and the price for this process, by a trial of 0.4 s, before the trace.
"""
_MAX_S: Final = 10.0
_STACKS: Final = {"hz": 499, "wait_span_ms": 0.1, "stack_gap_ms": 1.0, "tick_s": 0.1}
"""Of the capture beside a trace: a stall lasts from some 20 µs on, and the trace a second, so more
samples are taken than else, and short waits are kept one by one, too."""
_MOST_KERNELS: Final = 8
"""Of those within replays, that are printed."""
_MOST_CHARACTERS: Final = 100
"""Of a kernel's name."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the commands."""
    parser = subparsers.add_parser(
        "trace",
        help="every kernel, copy and call of a running process for a second, at a stated price",
        description="Trace all device work of a running process for a short while, by the CUPTI "
        "that it has loaded, with the stacks of its threads. Refused where that was not tried.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("pid", type=process_name, metavar="PID", help="the process, by pid or by name")
    add("-d", "--duration", type=_seconds, default=1.0, metavar="S",
        help="length of the trace, at most 10 (default: 1)")  # fmt: skip
    add("-o", "--output", type=Path, metavar="FILE",
        help="the timeline (default: sonde-trace-PID-TIME.json.gz); the capture with the stacks "
        "lies beside it (.sonde)")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print the price and whether it would be refused; touch nothing")  # fmt: skip
    add("--at-most", type=_percent, metavar="PERCENT",
        help="refuse where steps may take longer by more than this after the trace, until the "
        "process ends (0.5, for example)")  # fmt: skip
    add("--all-calls", action="store_true",
        help="all calls of the driver, too, not only those that launch or copy (costs several "
        "times as much, also afterwards)")  # fmt: skip
    add("--no-trial", action="store_false", dest="trial",
        help="leave out the trace of 0.4 s that measures the price on this process")  # fmt: skip
    add("--no-stacks", action="store_true", help="do not sample the process's threads meanwhile")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.01 <= (value := float(text)) <= _MAX_S:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.01 to 10")


def _percent(text: str) -> float:
    with suppress(ValueError):
        if 0.0 <= (value := float(text)) <= 1000.0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent")


def run(args: argparse.Namespace) -> int:
    """Trace. Raises SondeError where that is refused; the process is then as it was."""
    from sonde.attach import cupti_builds, kill_switch, memory_room, process
    from sonde.host import namespaces

    args.pid = pid_of(args.pid)
    path = args.output or Path(time.strftime(f"sonde-trace-{args.pid}-%Y%m%d-%H%M%S.json.gz"))
    if path.suffixes[-2:] != [".json", ".gz"]:
        raise UsageError(f"{path} does not end in .json.gz", "Name it so: -o trace.json.gz")
    capture = (
        None if args.no_stacks else path.with_name(path.name.removesuffix(".json.gz") + ".sonde")
    )
    if capture is not None and capture.exists():
        raise UsageError(
            f"{capture}, where the stacks beside {path.name} belong, exists",
            "Choose another name with -o.",
        )
    import_module("numpy")  # reads the trace: without it, the process would be traced for nothing
    kill_switch.require_allowed()
    namespaces.require_matching_proc()
    process.require(args.pid)
    try:
        build = cupti_builds.require(args.pid)
    except OSError as error:
        raise process.gone(args.pid) from error
    memory_room.require(args.pid)
    for line in trace_price.lines_of(build):
        _note(line)
    if args.dry_run:
        _note(f"process {args.pid} would be traced; nothing was touched")
        return 0
    raw, rates, price = _traced(args, build, capture)
    threads, nameless = process.threads_of(args.pid)
    if nameless:
        _note(f"{nameless:,} threads of process {args.pid} have no names: it has too many")
    # Thread ids are the process's own where it has a pid namespace: the trace gets those of here.
    trace = _checked(raw, args.pid, {own: here for own, (here, _) in threads.items()})
    _write(trace, path, dict(threads.values()))
    files = [path, *([capture] if capture is not None and capture.exists() else [])]
    _print_result(args, build, trace, files, rates, price)
    return 0


def _traced(
    args: argparse.Namespace, build: Build, capture: Path | None
) -> tuple[RawTrace, LaunchRates, Price | None]:
    """The trace, what the process launched before it, and what it cost it in a trial."""
    from sonde.cli.attach import memory_of
    from sonde.collect.tracing import Tracer

    with memory_of(args.pid) as memory, Tracer(args.pid, memory) as tracer:
        tracer.prepare()
        rates = tracer.rates()
        _note(trace_price.at_most_here(build, rates))
        if rates.captures:
            _note("it captures graphs and is not counted meanwhile: the trace costs more")
        if args.at_most is not None:
            trace_price.require_at_most(build, rates, args.at_most)

        def take_for(seconds: float, goes_on: Callable[[], bool] | None = None) -> RawTrace:
            taken = _has_subscriber(args.pid, build)
            return tracer.take(seconds, goes_on, all_calls=args.all_calls, taken=taken)

        price = None
        if args.trial:
            price = trace_price.measured(tracer, rates, take_for)
            _note(trace_price.text_of(price))

        def take(goes_on: Callable[[], bool] | None = None) -> RawTrace:
            return take_for(args.duration, goes_on)

        if capture is None:
            return take(), rates, price
        with _Stacks(args.pid, capture) as stacks:
            return stacks.beside(take), rates, price


def _has_subscriber(pid: int, build: Build) -> bool:
    from sonde.attach import cupti_builds, process

    try:
        return cupti_builds.has_subscriber(pid, build)
    except OSError as error:
        raise process.gone(pid) from error


class _Stacks:
    """Records the stacks of a process while a separate thread takes its trace."""

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path
        self._result: RawTrace | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._cancelled = threading.Event()

    def __enter__(self) -> _Stacks:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled.set()

    def beside(self, take: _Take) -> RawTrace:
        """Record stacks into the capture while `take` makes the trace, which is returned. Raises
        what `take` raises. Without the right to sample there are no stacks, and a note on that."""
        from sonde.agent import Agent
        from sonde.config import load
        from sonde.host import descriptors
        from sonde.host.requirements import require_recording
        from sonde.sinks.capture import CaptureFile

        try:
            require_recording()
        except HostError as error:
            _note(f"no stacks: {error.cause}")
            return take(lambda: True)
        descriptors.raise_limit()
        flags = {**_STACKS, "pids": [self._pid], "device_calls": False, "device_time": "off",
                 "injected": False}  # fmt: skip
        sink = CaptureFile(self._path)
        try:
            agent = Agent(load(flags), sink)
            agent.start()
        except BaseException:
            sink.discard()
            raise
        thread = threading.Thread(target=self._take, args=(take,), name="sonde-trace", daemon=True)
        thread.start()
        try:
            agent.run(self._done.is_set, lambda _: None)
        finally:
            self._cancelled.set()
            thread.join()
            agent.stop()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _take(self, take: _Take) -> None:
        try:
            self._result = take(lambda: not self._cancelled.is_set())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


def _checked(raw: RawTrace, pid: int, tids: dict[int, int]) -> DeviceTrace:
    from sonde.readers import device_trace

    wall_offset_ns = time.time_ns() - time.monotonic_ns()
    trace = device_trace.read(raw, pid, wall_offset_ns, tids)
    if problem := device_trace.problem(trace):
        _note(f"warning: {problem}")
    return trace


def _write(trace: DeviceTrace, path: Path, threads: dict[int, str]) -> None:
    import gzip

    from sonde.export import device_trace
    from sonde.private_files import replacing

    name = threads.get(trace.pid, "")
    with replacing(path) as out, gzip.GzipFile("", "wb", 1, out) as packed:
        device_trace.write(trace, packed, process=name, threads=threads)


def _print_result(
    args: argparse.Namespace,
    build: Build,
    trace: DeviceTrace,
    files: list[Path],
    rates: LaunchRates,
    price: Price | None,
) -> None:
    """`rates`: before the trace."""
    from sonde.model.device_trace import CALL_KINDS, Kind

    seconds = (trace.end_ns - trace.start_ns) / 1e9
    kernels = trace.of(Kind.KERNEL)
    in_graphs = int((kernels["graph"] > 0).sum())
    found = {
        "kernels": len(kernels), "kernels_in_graphs": in_graphs,
        "copies": trace.count(Kind.COPY), "sets": trace.count(Kind.SET),
        "calls": trace.count(*CALL_KINDS),
    }  # fmt: skip
    in_replays, unknown = _in_replays(trace, rates.replays)
    if args.json:
        outcome = {
            "files": [str(path) for path in files], "cupti": build.version, "seconds": seconds,
            **found, "cut": trace.is_cut, "lost": dict(trace.lost),
            "launches_a_second": rates.launches, "replays_a_second": rates.replays,
            "price": None if price is None else asdict(price),
            "in_replays": [asdict(one) for one in in_replays], "in_replays_unknown": unknown,
        }  # fmt: skip
        print(json.dumps(outcome, indent=2))
        return
    print(
        f"{seconds:.2f} s: {found['kernels']:,} kernels ({in_graphs:,} in replayed graphs), "
        f"{found['copies']:,} copies, {found['sets']:,} sets, {found['calls']:,} calls"
    )
    if trace.is_cut:
        print("the trace ended early: another profiler of the process came, or it was called off")
    for what, count in trace.lost.items():
        print(f"LOST  {count:,} {what}")
    for one in in_replays[:_MOST_KERNELS]:
        print(
            f"in replays, of the time before the trace: {100 * one.share:5.1f} % "
            f"± {100 * one.half_width:.1f}  {one.name[:_MOST_CHARACTERS]}"
        )
    if in_graphs and unknown:
        print(f"kernels in replays have no shares of the time: {unknown}")
    if text := _verdict(files):
        print(f"\n{text}")
    print(f"\n{files[0]}: the timeline, for ui.perfetto.dev; the verdict in full: sonde explain "
          + " ".join(map(str, files)))  # fmt: skip


def _in_replays(trace: DeviceTrace, replays_a_second: float) -> tuple[list[ReplayKernel], str]:
    """Kernels within replays, and why there are none."""
    from sonde.analyze.replay_kernels import replay_kernels

    try:
        return replay_kernels(trace, replays_a_second), ""
    except ValueError as error:
        return [], str(error)


def _verdict(files: list[Path]) -> str:
    """The verdict on the files, or why there is none."""
    from sonde.export import verdict
    from sonde.recording import verdicts

    found = verdicts.of_files(files)
    if found.explanation is None:
        return f"no verdict: {found.missing}"
    return verdict.render(found.explanation, 0)


def _note(text: str) -> None:
    print(f"sonde: {text}", file=sys.stderr, flush=True)


if TYPE_CHECKING:
    from collections.abc import Callable

    _Take = Callable[[Callable[[], bool]], RawTrace]
