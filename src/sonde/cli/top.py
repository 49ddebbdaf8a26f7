# SPDX-License-Identifier: Apache-2.0
"""`sonde top`: a live table of the processes that use CPUs and devices."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from sonde import procfs
from sonde.cli import unread_processes
from sonde.cli.named_processes import pids_of, process_name
from sonde.errors import UsageError
from sonde.export.layout import one_line, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sonde.agent.top import Top, Usage

EXAMPLE = """\
examples:
  sonde top                          who uses CPUs or devices, refreshed each second, until Ctrl-C
  sonde top -p train.py --interval 5 one process and what it launches on devices
  sonde top --sort memory            who has most of it: those that used nothing, too
  sonde top --once --json | jq '.processes[] | select(.device.busy > 0.5)'

Device columns need the library in a process: `sonde attach PID`, or `sonde record -- CMD`; a
process whose library a recorder reads shows none here. BUSY is the time of its runs on devices as a
share of the elapsed time: an estimate from the runs that were timed. PROCESS is the program, what
an interpreter runs, and the rank in a job; other arguments may hold secrets and are not shown (…).
"""
BUDGET: Final = 0.01
"""Of each program's time, the share that timing its launches may take."""
CLEAR: Final = "\033[H\033[J"
"""Clears the terminal."""
MOST_WIDE: Final = 10_000
"""Cells of a line in a file or pipe, where nothing is cut to fit."""
SPARE_LINES: Final = 5
"""Of the terminal, that have no processes: totals, head, note, prompt."""
BY_USE: Final = ("busy", "cpu", "device")
"""Orders in which processes that used nothing are left out."""
ORDERS: Final[dict[str, Callable[[Usage], Any]]] = {
    "busy": lambda one: 0,  # keeps the order of `Top.look`: by device, then by CPU
    "cpu": lambda one: -one.cpu,
    "memory": lambda one: -one.resident_bytes,
    "device": lambda one: -one.device.busy if one.device else 0.0,
    "pid": lambda one: one.pid,
    "name": lambda one: one.name,
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top` to the commands."""
    parser = subparsers.add_parser(
        "top",
        help="live table of the processes that use CPUs and devices",
        description="A live table: processes with CPU time, device time and launches.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-p", "--pid", type=process_name, action="extend", nargs="+", metavar="PID",
        help="only these, by pid or by name")  # fmt: skip
    add("--interval", type=_seconds, default=1.0, metavar="S", help="refresh interval (default 1)")
    add("--sort", choices=ORDERS, default="busy", metavar="KEY",
        help=f"{', '.join(ORDERS)} (default: busy, devices before CPUs)")  # fmt: skip
    add(
        "--lines",
        type=int,
        default=0,
        metavar="N",
        help="of processes (default: as many as fit, all in a pipe or file)",
    )
    add("--idle", action="store_true", help="processes that used nothing, too")
    add("--kernel-threads", action="store_true", help="threads of the kernel, too")
    add("--once", action="store_true", help="print once, then exit")
    add("--json", action="store_true", help="print each update as a line of JSON")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.1 and 3600 seconds")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Print the table repeatedly until interrupted."""
    from sonde.cli.abort_signals import AbortOnSecondSignal

    try:
        with AbortOnSecondSignal():
            return _run(args)
    except KeyboardInterrupt:
        return 0  # the normal way to end


def _run(args: argparse.Namespace) -> int:
    procfs.BROKER.warm_up()
    from sonde.agent.top import Top

    pids = pids_of(args.pid) if args.pid else None
    top = Top(pids, BUDGET)
    try:
        if not top.processes:
            numbers = ", ".join(map(str, pids or ()))
            raise UsageError(f"there is no process {numbers}", "ps -e shows those there are.")
        while True:
            time.sleep(args.interval)
            _show(top, args)
            if args.once:
                return 0
    finally:
        top.close()


def _show(top: Top, args: argparse.Namespace) -> None:
    found = in_order(top.look(), args.sort)
    if args.json:
        document = {
            "processes": [
                asdict(one) | {"command": procfs.command_of(one.pid, one.name)} for one in found
            ],
            "left_out": unread_processes.counts(),
        }
        print(json.dumps(document), flush=True)
        return
    is_terminal = sys.stdout.isatty()
    columns, rows = shutil.get_terminal_size((100, 40)) if is_terminal else (MOST_WIDE, sys.maxsize)
    kept, left_out = shown_of(found, args)
    lines = args.lines or max(1, rows - SPARE_LINES - bool(left_out))
    kept = [replace(one, name=procfs.command_of(one.pid, one.name)) for one in kept[:lines]]
    notes = [note for note in (left_out, unread_processes.line()) if note]
    screen = table(found, kept, columns, "\n".join(notes))
    print((CLEAR if is_terminal and not args.once else "") + screen, flush=True)


def in_order(found: Sequence[Usage], key: str) -> list[Usage]:
    """The processes sorted by a key of `ORDERS`."""
    return sorted(found, key=ORDERS[key])


def shown_of(found: Sequence[Usage], args: argparse.Namespace) -> tuple[list[Usage], str]:
    """(the processes to list, a line on those that are left out, '' where there are none).

    Those that -p names are all listed. Else threads of the kernel are left out, and what used
    nothing, where processes are listed by what they use.
    """
    if args.pid:
        return [*found], ""
    kernel = [one for one in found if one.is_kernel and not args.kernel_threads]
    hidden = {one.pid for one in kernel}
    hides_idle = not args.idle and args.sort in BY_USE
    idle = [one for one in found if hides_idle and one.is_idle and one.pid not in hidden]
    hidden.update(one.pid for one in idle)
    texts = []
    if idle:
        texts.append(f"{len(idle):,} processes that used nothing (--idle)")
    if kernel:
        used = f", {sum(one.cpu for one in kernel):.2f} CPUs busy"
        texts.append(f"{len(kernel):,} threads of the kernel{used} (--kernel-threads)")
    line = f"left out: {', '.join(texts)}" if texts else ""
    return [one for one in found if one.pid not in hidden], line


def table(found: Sequence[Usage], shown: Sequence[Usage], width: int, note: str = "") -> str:
    """The totals of all processes, a line for each of `shown`, and lines on what is missing."""
    devices = [one.device for one in found if one.device is not None]
    cpus = sum(one.cpu for one in found)
    # Without a process on a device, names get the room of the device columns.
    head = f"{'BUSY %':>7} {'LAUNCHES/S':>11} {'COPIED/S':>10} " if devices else ""
    launches = f"{sum(one.launches_per_s for one in devices):,.0f} launches/s"
    timed = f"; {len(devices)} timed on devices, {launches}" if devices else ""
    text = [
        f"{len(found)} processes, {cpus:.2f} CPUs busy{timed}",
        f"{'PID':>8} {'USER':<10} {'CPU %':>7} {'MEMORY':>9} {head} PROCESS",
    ]
    for one in shown:
        it = one.device
        on_device = (
            f"{it.busy * 100:7.1f} {it.launches_per_s:11,.0f} {size(it.copied_bytes_per_s):>10} "
            if it is not None
            else f"{'-':>7} {'-':>11} {'-':>10} "
        )
        memory = size(one.resident_bytes)
        text.append(
            f"{one.pid:>8} {one.user[:10]:<10} {one.cpu * 100:7.1f} {memory:>9} "
            f"{on_device if devices else ''} {one.name}"
        )
    text += note.splitlines()
    return "\n".join(one_line(line)[:width] for line in text)
