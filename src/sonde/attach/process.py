# SPDX-License-Identifier: Apache-2.0
"""Whether a library can be loaded into a process, and by us; checked before it is touched."""

from __future__ import annotations

import os
import platform
import pwd
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.errors import PermissionDenied, ProcessGone, TargetRefused, TargetStopped, UsageError

MAX_THREADS: Final = 65_536
"""Of one process, that are looked at."""
THREADS_S: Final = 4.0
"""How long looking at all of them may take. 20,000 take a second; but the kernel writes a status
whole, with all groups that a thread has, and one with 65,536 of them takes 20 ms."""
_CAP_SYS_PTRACE: Final = 19
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_LOOK_UP: Final = "Look the pid up with: ps -e -o pid,args"


@dataclass(frozen=True, slots=True)
class Status:
    """Of /proc/PID/status or /proc/PID/task/TID/status (proc_pid_status(5))."""

    name: str
    state: str
    tgid: int
    uid: int
    """The real one."""
    tracer: int
    """Pid of the process that traces it; 0: none."""
    inner_tid: int
    """Its number in the process's pid namespace."""
    seccomp: int
    """0 none, 1 strict, 2 filters."""
    filters: int
    """Seccomp filters on it; 0 also before Linux 5.9, which does not show them."""
    shadow_stack: bool
    capabilities: int
    """The effective ones, as bits."""


def threads_of(pid: int) -> tuple[dict[int, tuple[int, str]], int]:
    """(tid in our pid namespace, name) of each thread, by its tid in the process's; and how many
    there was no time for (THREADS_S). Empty where the process is gone."""
    found: dict[int, tuple[int, str]] = {}
    try:
        tids = _tids(pid)
    except ProcessGone:
        return {}, 0
    until_s = time.monotonic() + THREADS_S
    for at, tid in enumerate(tids):
        if at >= MAX_THREADS or time.monotonic() > until_s:
            return found, len(tids) - at
        if status := read_status(pid, tid):
            found[status.inner_tid] = tid, status.name
    return found, 0


def program_of(pid: int) -> str:
    """Where the kernel put the code and the stack of the program that the process executes: for
    another program, one with other rights at least, it chooses others at random (stat(5), fields
    26 to 28 and 48). Takes none of the process's locks. Raises ProcessGone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        after_name = text.rpartition(")")[2].split()
        return ",".join(after_name[field - 3] for field in (26, 27, 28, 48))
    except (OSError, IndexError) as error:
        raise gone(pid) from error


def read_status(pid: int, tid: int | None = None, proc: Path = Path("/proc")) -> Status | None:
    """Of a process or thread; None where it is gone, or its status cannot be read."""
    path = proc / str(pid) / "status" if tid is None else proc / f"{pid}/task/{tid}/status"
    try:
        lines = procfs.read_lines(path)
    except (OSError, ValueError):
        return None
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        return Status(
            name=fields["Name"],
            state=fields["State"][:1],
            tgid=int(fields["Tgid"]),
            uid=int(fields["Uid"].split()[0]),
            tracer=int(fields.get("TracerPid", 0)),
            inner_tid=int(fields.get("NSpid", fields["Pid"]).split()[-1]),
            seccomp=int(fields.get("Seccomp", 0)),
            filters=int(fields.get("Seccomp_filters", 0)),
            shadow_stack="shstk" in fields.get("x86_Thread_features", "").split(),
            capabilities=int(fields.get("CapEff", "0"), 16),
        )
    except (KeyError, IndexError, ValueError):
        return None


def start_time(pid: int) -> int:
    """When it started, in ns since boot: with the pid, its identity. Raises ProcessGone."""
    stat = procfs.read_stat(pid)
    if stat is None:
        raise gone(pid)
    return stat.start_ns


def gone(pid: int) -> ProcessGone:
    """The error for a process that ended meanwhile."""
    return ProcessGone(f"process {pid} ended meanwhile", "")


def require(pid: int) -> Status:
    """The status of a process that may be attached to, as far as /proc shows that. Touches nothing.

    Raises UsageError (no such process), PermissionDenied (with the capability that is missing),
    TargetRefused (it cannot be done to this process), ProcessGone.
    """
    if platform.machine() != "x86_64":
        raise TargetRefused(
            f"attaching is proved on x86-64 alone, and this is {platform.machine()}",
            "Start the program with: sonde record -- CMD",
        )
    status = read_status(pid) if pid > 0 else None
    if status is None:
        raise UsageError(f"there is no process {pid}", _LOOK_UP)
    if status.tgid != pid:
        raise UsageError(
            f"{pid} is a thread of process {status.tgid}", f"Name the process: {status.tgid}"
        )
    if pid == os.getpid():
        raise UsageError(f"{pid} is this very command", _LOOK_UP)
    _require_living(pid, status)
    _require_permission(pid, status)
    return status


def _require_living(pid: int, status: Status) -> None:
    match status.state:
        case "Z" | "X" if procfs.memory_task(pid) != pid:
            raise TargetRefused(
                f"the first thread of process {pid} has ended, and attaching is not proved then",
                "Start the program with: sonde record -- CMD",
            )
        case "Z" | "X":
            raise TargetRefused(f"process {pid} has ended; its parent has not noticed yet", "")
        case "T":
            raise TargetStopped(f"process {pid} is stopped", f"Let it run: kill -CONT {pid}")
        case "t" if status.tracer != os.getpid():
            raise _traced(pid, status.tracer)
    tids = _tids(pid)
    until_s = time.monotonic() + THREADS_S
    for at, tid in enumerate(tids):
        if at >= MAX_THREADS or time.monotonic() > until_s:
            raise TargetRefused(
                f"process {pid} has {len(tids):,} threads, and looking at {at:,} of them took "
                f"{time.monotonic() - until_s + THREADS_S:.1f} s: too long",
                "Start the program with: sonde record -- CMD",
            )
        thread = read_status(pid, tid)
        if thread is not None and thread.tracer not in (0, os.getpid()):
            raise _traced(pid, thread.tracer)
        if thread is not None and thread.shadow_stack:
            raise TargetRefused(
                f"process {pid} runs with shadow stacks, under which attaching is not proved",
                "Start it with: sonde record -- CMD",
            )


def _traced(pid: int, tracer: int) -> TargetRefused:
    status = read_status(tracer)
    name = f"{status.name} (pid {tracer})" if status is not None else f"pid {tracer}"
    return TargetRefused(
        f"process {pid} is being traced by {name}", "Detach that one, or wait until it ends."
    )


def _tids(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
    except OSError as error:
        raise gone(pid) from error


def _require_permission(pid: int, status: Status) -> None:
    own = read_status(os.getpid())
    privileged = own is not None and bool(own.capabilities >> _CAP_SYS_PTRACE & 1)
    remedy = f"Give CAP_SYS_PTRACE: sudo sonde attach {pid}"
    scope = _yama()
    if scope == 3:
        raise PermissionDenied(
            "this machine lets nobody trace a process (kernel.yama.ptrace_scope is 3)",
            "Boot with another setting, or start the program with: sonde record -- CMD",
        )
    if not privileged:
        if status.uid != os.getuid():
            raise PermissionDenied(
                f"process {pid} belongs to {_user(status.uid)}, and CAP_SYS_PTRACE is not held",
                remedy,
            )
        if scope in (1, 2):
            raise PermissionDenied(
                f"kernel.yama.ptrace_scope is {scope}, and CAP_SYS_PTRACE is not held", remedy
            )
    try:
        has_program = _has_program(pid)
        procfs.HeldFile(f"/proc/{pid}/mem").close()
    except PermissionError as error:
        raise PermissionDenied(
            f"process {pid} may not be looked into: it is protected, "
            "has other privileges, or lies in another user namespace",
            remedy if not privileged else "Run Sonde in the host's user namespace.",
        ) from error
    except procfs.Hung as error:
        raise TargetRefused(
            f"process {pid} makes its readers wait",
            "Look for file systems (FUSE) whose server does not answer.",
        ) from error
    except OSError as error:
        if read_status(pid) is None:
            raise gone(pid) from error
        raise TargetRefused(f"process {pid} is a thread of the kernel", _LOOK_UP) from error
    if not has_program:
        raise TargetRefused(f"process {pid} is a thread of the kernel", _LOOK_UP)


def _has_program(pid: int) -> bool:
    """Whether anything is mapped: not in a thread of the kernel. Raises OSError."""
    with procfs.MapsReader(pid, most_bytes=1) as reader:
        return any(True for _ in reader.blocks()) or reader.is_cut


def _yama() -> int:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"
