# SPDX-License-Identifier: Apache-2.0
"""`sonde detach PID`: removes the library's hooks in a process and deactivates it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

from sonde import procfs
from sonde.cli.named_processes import pids_of, process_name
from sonde.errors import AttachFailed, PermissionDenied, UsageError

EXAMPLE = """\
examples:
  sudo sonde detach 4711               until the next `sonde attach`
  sudo sonde detach --all              from every process of this machine
  sudo sonde detach --all --for-good   the kill switch: until those processes end

The library stays loaded (a library with threads cannot be unloaded safely) and idle: it costs
nothing but the memory it made.
"""

_TIMEOUT_S: Final = 3.0
"""How long the library may take to respond."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `detach` to the commands."""
    parser = subparsers.add_parser(
        "detach",
        help="turn device time off in a process",
        description="Remove the hooks of the library in a process, and deactivate it.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sonde detach [PID …] [--all] [--for-good] [--json]",
    )
    add = parser.add_argument
    add("pids", type=process_name, nargs="*", metavar="PID",
        help="the processes, by pid or by name")  # fmt: skip
    add("--all", action="store_true", help="every process that has the library")
    add("--for-good", action="store_true", help="until the process ends: no attach undoes it")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Detach. Raises UsageError for a process without the library."""
    if args.all == bool(args.pids):
        raise UsageError("name processes, or --all", "For example: sonde detach 4711")
    states: dict[int, str] = {}
    for pid in _all_pids() if args.all else pids_of(args.pids):
        state = _detach(pid, for_good=args.for_good, must_have_it=not args.all)
        if state:
            states[pid] = state
    if args.json:
        print(json.dumps([{"pid": pid, "state": state} for pid, state in states.items()], indent=2))
    elif states:
        print("\n".join(f"process {pid}: {state}" for pid, state in states.items()))
    else:
        print("no process has the library")
    slow = [pid for pid, state in states.items() if state not in ("left", "killed")]
    if slow:
        print(
            f"sonde: process {', '.join(map(str, slow))} has not responded yet: is it stopped?",
            file=sys.stderr,
        )
    return 0


def _all_pids() -> list[int]:
    return procfs.pids()


def _detach(pid: int, *, for_good: bool, must_have_it: bool) -> str:
    """The library's state afterwards. For a process without the library, or where it cannot be
    reached: '' unless `must_have_it`, else raises SondeError."""
    from sonde.collect import inject_abi as abi
    from sonde.collect.inject_memory import InjectMemory

    if must_have_it and not procfs.is_there(f"/proc/{pid}"):
        raise UsageError(f"there is no process {pid}", "Look the pid up with: ps -e -o pid,args")
    try:
        memory = InjectMemory.find(pid)
    except PermissionError as error:
        if not must_have_it:
            return ""
        raise PermissionDenied(
            f"no access to process {pid}: it belongs to another user, or is protected",
            f"Run it with sudo: sudo sonde detach {pid}",
        ) from error
    if memory is None:
        if must_have_it:
            raise UsageError(
                f"process {pid} does not have the library", "See which ones do: sonde detach --all"
            )
        return ""
    with memory:
        try:
            memory.ask(request=abi.Request.LEAVE)
            if for_good:
                memory.ask(off=abi.KILL)
            wanted = (abi.Status.KILLED,) if for_good else (abi.Status.LEFT, abi.Status.KILLED)
            return memory.wait_for(*wanted, timeout_s=_TIMEOUT_S).status.name.lower()
        except OSError as error:
            if must_have_it:
                raise AttachFailed(
                    f"process {pid}: {error}", "Check that it still runs."
                ) from error
            return ""
