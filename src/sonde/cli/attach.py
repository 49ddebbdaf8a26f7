# SPDX-License-Identifier: Apache-2.0
"""`sonde attach PID`: load the device-time library into a running process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Final

from sonde.cli.named_processes import pid_of, process_name
from sonde.errors import AttachFailed, TargetRefused

if TYPE_CHECKING:
    from sonde.attach.remote import Loaded
    from sonde.collect.inject_memory import InjectMemory, Seen

EXAMPLE = """\
examples:
  sudo sonde attach 4711                 the process keeps running; the library is idle
  sudo sonde record -p 4711 -d 30        its device time, too
  sudo sonde detach 4711

One sleeping thread of the process is borrowed for a few milliseconds to load the library, and then
restored. While nothing records, the library does nothing.
"""

_APPEARS_S: Final = 2.0
"""How long a loaded library may take to create its shared memory."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `attach` to the commands."""
    parser = subparsers.add_parser(
        "attach",
        help="load the device-time library into a running process",
        description="Load the device-time library into a running process, without a restart.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("pid", type=process_name, metavar="PID", help="the process, by pid or by name")
    add("--wait", type=_seconds, default=5.0, metavar="S",
        help="how long to wait for a thread that can be borrowed (default: 5)")  # fmt: skip
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 600")
    return value


def run(args: argparse.Namespace) -> int:
    """Attach. Raises SondeError where that is impossible; the process is then unchanged."""
    from sonde.attach import kill_switch, process
    from sonde.collect import device_process, slots
    from sonde.collect import inject_abi as abi
    from sonde.host import namespaces

    kill_switch.require_allowed()
    namespaces.require_matching_proc()
    args.pid = pid_of(args.pid)
    process.require(args.pid)
    memory, loaded = _found_or_loaded(args.pid, args.wait)
    with memory:
        if memory.is_detached():
            # The request that a recorder makes. Without a recorder's heartbeat the library is idle.
            memory.ask(request=device_process.REQUEST | slots.slots_asked(args.pid))
            seen = memory.wait_for(*set(abi.Status) - {abi.Status.LEFT}, timeout_s=1.0)
        else:
            starting = {abi.Status.STARTING}
            seen = memory.wait_for(*set(abi.Status) - starting, timeout_s=1.0)
        _print_result(args, loaded, seen)
    return 0


def memory_of(pid: int, wait_s: float = 5.0) -> InjectMemory:
    """The shared memory of the library in a process; loads the library where it is missing.

    Raises TargetRefused where device time was turned off there (`sonde detach`), SondeError where
    the library cannot be loaded.
    """
    memory, _ = _found_or_loaded(pid, wait_s)
    if memory.is_detached():
        memory.close()
        raise TargetRefused(
            f"process {pid} was detached (sonde detach)", f"Attach again: sonde attach {pid}"
        )
    return memory


def _found_or_loaded(pid: int, wait_s: float) -> tuple[InjectMemory, Loaded | None]:
    """The library's shared memory, and how it was loaded; None: it was there already."""
    from sonde.attach import remote
    from sonde.collect import inject_abi as abi

    memory, loaded = _find(pid), None
    if memory is None:
        loaded = remote.load_injected_library(pid, wait_s=wait_s)
        memory = _wait_for_memory(pid)
    if memory.seen().status is abi.Status.KILLED:
        memory.close()
        raise TargetRefused(
            f"device time is off for good in process {pid} (sonde detach --for-good)",
            "Restart the process.",
        )
    return memory, loaded


def _find(pid: int) -> InjectMemory | None:
    from sonde.collect.inject_memory import InjectMemory

    try:
        return InjectMemory.find(pid)
    except PermissionError:
        return None  # the attempt to load it reports which permission is missing


def _wait_for_memory(pid: int) -> InjectMemory:
    """Wait for the shared memory that a loaded library creates. Raises AttachFailed."""
    deadline = time.monotonic() + _APPEARS_S
    while time.monotonic() < deadline:
        memory = _find(pid)
        if memory is not None:
            return memory
        time.sleep(0.02)
    raise AttachFailed(
        f"process {pid} loaded the library, but it does not work there",
        "It is inactive if SONDE_INJECT=off is in the process's environment, or without memory.",
    )


def _print_result(args: argparse.Namespace, loaded: Loaded | None, seen: Seen) -> None:
    state = seen.status.name.lower()
    if args.json:
        result: dict[str, object] = {"pid": args.pid, "loaded": loaded is not None, "state": state}
        if loaded is not None:
            result |= {"thread": loaded.tid, "call": loaded.call, "stop_us": round(loaded.stop_us)}
        print(json.dumps(result | {"why": seen.why}, indent=2))
        return
    if loaded is None:
        print(f"process {args.pid} already has the library; it is {state}")
    else:
        print(
            f"process {args.pid} has the library; thread {loaded.tid}, sleeping in {loaded.call}, "
            f"was stopped for {loaded.stop_us / 1000:.1f} ms; it is {state}"
        )
    if seen.why:
        print(f"  {seen.why}", file=sys.stderr)
    print(f"record its device time with: sonde record -p {args.pid}")
