# SPDX-License-Identifier: Apache-2.0
"""Loads a library into a live process, by a child (`tracer`), and returns or raises the outcome."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde import errors, interpreter, procfs
from sonde.attach import glibc, library, lock, process
from sonde.errors import AttachFailed, SondeError, TargetRefused, TracerFailed

LIBRARY_MEMFD: Final = "sonde-library"
"""What a process's mappings call the memfd that the library is loaded from."""
WAIT_S: Final = 5.0
"""How long the tracer waits for a thread that may be borrowed."""
_PATIENCE_S: Final = 15.0
"""How much longer its answer, or the end of another attach to the process, is waited for."""
HANGING_OF_PARTY: Final = 2
"""Tracers over processes of one party (procfs.party_of) that were killed and cannot die. With this
many of them no other process of that party is attached to."""
MAX_HANGING: Final = 16
"""The same of all parties; at this number nothing more is attached."""


_hanging: Final[list[tuple[subprocess.Popen[bytes], int]]] = []
"""Tracers that were killed and have not died, each with the party of its target."""
_hanging_lock: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a library was loaded."""

    tid: int
    """The thread that was borrowed."""
    call: str
    """The system call that it slept in."""
    stop_us: float
    """How long it was borrowed."""
    busy: int
    """Times that a thread was put back because a lock was held."""


def load(
    pid: int,
    library: Path,
    name: str = LIBRARY_MEMFD,
    wait_s: float = WAIT_S,
    program: str = "",
) -> Loaded | None:
    """Load `library` into process `pid`; None: it is there already. After every error the process
    goes on unharmed.

    `name`: of the memfd that it is loaded from; `program`: `process.program_of` it, where it must
    not have executed another program since that was read. Raises UsageError, PermissionDenied,
    TargetRefused (before the process was touched, or when no thread of it could be borrowed),
    SinkError, AttachFailed, TracerFailed, ProcessGone.
    """
    process.require(pid)
    with lock.alone(pid, _PATIENCE_S):
        if is_mapped(pid, name):
            return None
        arguments = [str(pid), str(library.absolute()), name, str(wait_s), program]
        outcome = _run(arguments, wait_s, procfs.party_of(pid))
    if "error" in outcome:
        raised = getattr(errors, str(outcome["error"]), AttachFailed)
        assert issubclass(raised, SondeError)
        raise raised(str(outcome["cause"]), str(outcome["remedy"]))
    why = str(outcome["why"])
    match outcome["outcome"]:
        case "loaded":
            return Loaded(
                int(outcome["tid"]),
                str(outcome["call"]),
                float(outcome["stop_us"]),
                int(outcome["busy"]),
            )
        case "refused":
            raise TargetRefused(why, _remedy(why, pid))
        case _:
            raise AttachFailed(f"process {pid}: {why}", "Look again in a minute.")


def _remedy(why: str, pid: int) -> str:
    if "seccomp" in why and "cannot be read" in why:
        return "Give CAP_SYS_ADMIN, and run Sonde itself without a seccomp filter."
    if "refused the library" in why or "memfd" in why:
        return (
            "Look for a denial of SELinux or AppArmor, and at sysctl vm.memfd_noexec; if it has "
            "many libraries, start it with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096."
        )
    if "slept" in why:
        return (
            "Try again when it is less busy, or start it with: sonde record -- CMD "
            "(see docs/design/attach.md for what a thread must be doing)."
        )
    return "Start the program with: sonde record -- CMD"


def hanging(party: int | None = None) -> int:
    """Tracers that were killed and have not died yet: over processes of one party, or of all."""
    with _hanging_lock:
        _hanging[:] = [it for it in _hanging if it[0].poll() is None]
        return sum(party in (None, of) for _, of in _hanging)


def _require_few_hanging(party: int) -> None:
    """Raises AttachFailed where the party has too many tracers that hang, TracerFailed where all
    together have."""
    remedy = "Look for file systems (FUSE, NFS) whose server does not answer."
    for failure, count, most, whose in (
        (AttachFailed, hanging(party), HANGING_OF_PARTY, f", of {procfs.name_of(party)}"),
        (TracerFailed, hanging(), MAX_HANGING, ""),
    ):
        if count >= most:
            raise failure(
                f"{count} attaching processes{whose} were killed and hang in the kernel", remedy
            )


def _run(arguments: list[str], wait_s: float, party: int) -> dict[str, Any]:
    """Run the tracer to its end; its answer. `party`: of the process that is attached to."""
    _require_few_hanging(party)
    try:
        tracer = interpreter.start(
            interpreter.command("sonde.attach.tracer", *arguments),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            own_session=True,
        )
    except OSError as error:
        raise TracerFailed(f"no attaching process: {error.strerror}", "Try again.") from error
    try:
        out, err = tracer.communicate(timeout=wait_s + _PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        interpreter.give_up(tracer)  # safe at any instant: docs/design/attach.md
        with _hanging_lock:
            _hanging.append((tracer, party))
        raise AttachFailed("the attach did not end in time", "Try again.") from error
    if tracer.returncode != 0 or not out:
        last = (err.decode(errors="replace").strip() or "no message").split("\n")[-1]
        # It exits with 0 and an answer for all that the target can cause, but for a signal.
        failed = TracerFailed if tracer.returncode > 0 else AttachFailed
        raise failed(f"the attaching process failed: {last}", "Try again.")
    outcome: dict[str, Any] = json.loads(out)
    return outcome


def load_injected_library(pid: int, program: str = "", *, wait_s: float = WAIT_S) -> Loaded | None:
    """`load` of the injected library. Raises MissingDependency, too, where it was not built."""
    return load(pid, library.path(), wait_s=wait_s, program=program)


def is_mapped(pid: int, name: str = LIBRARY_MEMFD) -> bool:
    """Whether code of the memfd `name` is mapped in the process. Raises ProcessGone."""
    try:
        return glibc.has_library(glibc.mappings_of(pid), name)
    except OSError as error:
        raise process.gone(pid) from error
