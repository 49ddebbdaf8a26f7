# SPDX-License-Identifier: Apache-2.0
"""Has a library loaded into a live process, by a process of its own, and says what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde import errors
from sonde.attach import glibc, library, process
from sonde.errors import AttachFailed, SondeError, TargetRefused

LIBRARY_MEMFD: Final = "sonde-library"
"""What a process's mappings call the memfd that the library is loaded from."""
WAIT_S: Final = 5.0
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library that is in."""

    tid: int
    """The thread that was borrowed."""
    call: str
    """What it slept in."""
    stop_us: float
    """How long it was away."""
    busy: int
    """Times that a thread was put back because a lock was held."""


def load(
    pid: int, library: Path, name: str = LIBRARY_MEMFD, wait_s: float = WAIT_S
) -> Loaded | None:
    """Load `library` into process `pid`; None: it is there already. Whatever is raised, the process
    goes on unharmed.

    Raises UsageError, PermissionDenied, TargetRefused (before the process was touched, or when no
    thread of it could be borrowed), AttachFailed, ProcessGone.
    """
    process.require(pid)
    with _alone(pid):
        if is_mapped(pid, name):
            return None
        said = _run([str(pid), str(library), name, str(wait_s)], wait_s)
    if "error" in said:
        raised = getattr(errors, str(said["error"]), AttachFailed)
        assert issubclass(raised, SondeError)
        raise raised(str(said["cause"]), str(said["remedy"]))
    why = str(said["why"])
    match said["outcome"]:
        case "loaded":
            return Loaded(
                int(said["tid"]), str(said["call"]), float(said["stop_us"]), int(said["busy"])
            )
        case "refused":
            raise TargetRefused(why, _remedy(why, pid))
        case _:
            raise AttachFailed(f"process {pid}: {why}", "Look again in a minute.")


def _remedy(why: str, pid: int) -> str:
    if "seccomp" in why and "cannot be read" in why:
        return "Give CAP_SYS_ADMIN, and run Sonde itself without a seccomp filter."
    if "refused the library" in why or "memfd" in why:
        return "Look for a denial of SELinux or AppArmor, and at sysctl vm.memfd_noexec."
    if "slept" in why:
        return (
            "Try again when it is less busy, or start it with: sonde record -- CMD "
            "(see docs/design/attach.md for what a thread must be doing)."
        )
    return "Start the program with: sonde record -- CMD"


def _run(arguments: list[str], wait_s: float) -> dict[str, Any]:
    """Run the tracer to its end; its answer."""
    # With our own modules, whatever lies in the current folder or is wished for in the environment.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_PRELOAD"))}
    tracer = subprocess.Popen(
        [sys.executable, "-P", "-S", "-s", "-m", "sonde.attach.tracer", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        out, err = tracer.communicate(timeout=wait_s + _PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        tracer.kill()  # safe at any instant: docs/design/attach.md
        tracer.communicate()
        raise AttachFailed("the attach did not end in time", "Try again.") from error
    if tracer.returncode != 0 or not out:
        last = (err.decode(errors="replace").strip().splitlines() or ["no word from it"])[-1]
        raise AttachFailed(f"the attaching process failed: {last}", "Try again.")
    said: dict[str, Any] = json.loads(out)
    return said


def load_product(pid: int, wait_s: float = WAIT_S) -> Loaded | None:
    """The same with Sonde's own library. Raises MissingDependency where it was not built, too."""
    return load(pid, library.path(), wait_s=wait_s)


def is_mapped(pid: int, name: str = LIBRARY_MEMFD) -> bool:
    """Whether code of the memfd `name` is mapped in the process. Raises ProcessGone."""
    try:
        return glibc.has_library(glibc.mappings_of(pid), name)
    except OSError as error:
        raise process.gone(pid) from error


@contextmanager
def _alone(pid: int) -> Iterator[None]:
    """Keep others who attach to the same process waiting; given up by itself when we die."""
    try:
        folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise process.gone(pid) from error
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TargetRefused(
                        f"somebody else is attaching to process {pid}", "Wait until that is done."
                    ) from error
                time.sleep(0.02)
        yield
    finally:
        os.close(folder)
