# SPDX-License-Identifier: Apache-2.0
"""`sonde dump PID`: the current stack of every thread of a process."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sonde import procfs
from sonde.cli import unread_processes
from sonde.cli.named_processes import pid_of, process_name
from sonde.errors import UsageError
from sonde.export.layout import one_line
from sonde.model.interpreter_lock import LockUse, lock_uses
from sonde.model.thread_doing import Doing, doing_of
from sonde.model.user_code import innermost_user_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonde.model.code import Frame
    from sonde.model.thread_stack import ProcessStacks, ThreadStack

EXAMPLE = """\
examples:
  sudo sonde dump 4711                 every thread's whole stack, native and Python together
  sudo sonde dump 4711 --python        its Python frames alone
  sudo sonde dump 4711 --json | jq '.threads[] | select(.state == "D")'

Threads with the same stack are shown together; --json has each by itself. What a sleeping thread
waits for is shown by its stack (a lock, another thread, a socket, a file), and a thread that runs
the interpreter as the one that holds Python's interpreter lock. The process is not stopped.
exit code: 0 done, 1 the process ended meanwhile, 2 there is no such process, 3 this machine cannot.
"""

# Of threads, as in /proc/PID/stat.
STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible sleep",
    "I": "idle",
    "P": "parked",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "ended",
    "X": "ended",
}


# Of threads that run, or have just run, the interpreter.
_LOCK: Final = {
    LockUse.NONE: "",
    LockUse.HOLDS: ", holds the interpreter lock (GIL)",
    LockUse.HELD: ", had the interpreter lock (GIL) at its moment",
    LockUse.WAITS: "",
}
WIDTH: Final = 80
"""Of lines that list threads, in cells."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `dump` to the commands."""
    parser = subparsers.add_parser(
        "dump",
        help="the current stack of every thread of a process",
        description="Print the whole stack of every thread of a running process, once.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("pid", type=process_name, metavar="PID", help="the process, by pid or by name")
    add("--python", action="store_true", help="Python frames only")
    add("--no-kernel", action="store_true", help="omit kernel frames")
    add("--json", action="store_true", help="print the threads as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the stacks of all threads."""
    from sonde.cli.abort_signals import AbortOnSecondSignal

    with AbortOnSecondSignal():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    procfs.BROKER.warm_up()
    from sonde.agent.dump import dump
    from sonde.host import namespaces

    namespaces.require_host_pids()
    args.pid = pid_of(args.pid)
    comm = _require(args.pid)
    command = procfs.with_comm(procfs.scripts_of([args.pid], is_patient=True)[0] or "", comm)
    found = dump(args.pid)
    hidden = {"kernel"} if args.no_kernel else set()
    if args.python:
        hidden = {"kernel", "user", "vdso", "jit", "unknown"}
    if args.json:
        documents = [
            {
                **asdict(it),
                "frames": [one._asdict() for one in it.frames if one.kind not in hidden],
                "interpreter_lock": use,
                "doing": doing_of(it, use),
            }
            for it, use in zip(found.threads, lock_uses(found.threads), strict=True)
        ]
        whole = {
            "pid": args.pid,
            "name": comm,
            "command": command,
            "threads": documents,
            "left_out": {
                **unread_processes.counts(),
                "threads": found.threads_left_out,
                "names": found.names_left_out,
            },
        }
        print(json.dumps(whole, indent=2))
    else:
        print(text(args.pid, command or comm, found.threads, hidden))
        for note in (unread_processes.line(), *missing(found)):
            if note:
                print(f"\n{note}")
    return 0


def _require(pid: int) -> str:
    """The name of a process. Raises UsageError for a thread, a process that has ended, or none."""
    folder = Path(f"/proc/{pid}")
    try:
        status = procfs.read_lines(folder / "status")
    except OSError as error:
        raise UsageError(f"there is no process {pid}", "Look it up: ps -e") from error
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    process = int(fields["Tgid"])
    if process != pid:
        raise UsageError(
            f"{pid} is a thread of process {process}", f"Dump that one: sonde dump {process}"
        )
    if fields["State"].startswith("Z") and procfs.memory_task(pid) == pid:
        raise UsageError(f"process {pid} has ended; its parent has not read its exit status yet")
    return fields["Name"]


def text(pid: int, name: str, threads: Sequence[ThreadStack], hidden: set[str]) -> str:
    """The dump as text, leaf frames first; `name`: of the process; `hidden`: kinds of frames to
    omit. Threads with the same stack are shown together."""
    count = f"{len(threads)} thread{'s' if len(threads) != 1 else ''}"
    lines = [f"process {pid} ({one_line(name)}), {count}"]
    alike: dict[tuple[str, ...], list[ThreadStack]] = {}
    for it, use in zip(threads, lock_uses(threads), strict=True):
        user = innermost_user_frame(it.frames)
        at = f", in {one_line(user.location)}" if user else ""
        how = f"{_state(it, use)}{_LOCK[use]}{at}"
        frames = [f"    {_line(one)}" for one in it.frames if one.kind not in hidden]
        if not it.is_whole:
            frames.append(f"    … cut short: {it.end}")
        elif not frames:
            frames.append("    (no such frames)")
        alike.setdefault((how, *frames), []).append(it)
    for (how, *stack), group in alike.items():
        lines += ["", *_heads(group, how), *stack]
    return "\n".join(lines)


def _state(thread: ThreadStack, use: LockUse) -> str:
    """What a thread does: 'waits for a lock', or its state where the stack does not show more."""
    state = STATES.get(thread.state, thread.state)
    doing = Doing.GIL if use == LockUse.WAITS else doing_of(thread, use)
    if not doing:
        return state
    if thread.state in ("S", "I"):
        return doing.description
    return f"{state}, {doing.description}"


def _heads(threads: Sequence[ThreadStack], how: str) -> list[str]:
    """The lines above a stack: whose it is, and what they do."""
    first = threads[0]
    if len(threads) == 1:
        return [f"thread {first.tid} ({one_line(first.name)}), {how}"]
    names = {one.name for one in threads}
    whose, shown = "", [f"{one_line(one.name)} ({one.tid})" for one in threads]
    if len(names) == 1:
        whose, shown = f" ({one_line(first.name)})", [str(one.tid) for one in threads]
    listed = textwrap.wrap(
        f"threads {', '.join(shown)}", WIDTH, subsequent_indent="  ", break_long_words=False
    )
    return [f"{len(threads)} threads{whose}, each {how}", *listed]


def missing(found: ProcessStacks) -> list[str]:
    """What is missing, in a line each."""
    lines = []
    if threads := found.threads_left_out:
        lines.append(f"left out: {threads:,} threads, as there was no room or no time for them")
    if names := found.names_left_out:
        lines.append(f"left out: names or lines of {names:,} frames, as finding them took too long")
    return lines


def _line(frame: Frame) -> str:
    name = one_line(frame.function or hex(frame.offset))
    if frame.kind == "python" or (frame.kind == "jit" and frame.file):
        # Compiled (JIT) code may have a file without a line.
        line = f":{frame.line}" if frame.line or frame.kind == "python" else ""
        return f"{name} ({one_line(frame.file)}{line})"
    return f"{name} [{one_line(frame.binary.strip('[]'))}]"
