# SPDX-License-Identifier: Apache-2.0
"""How a child that runs Python is started: the only place that does.

What may hang or die runs in a separate child, often as root. Such a child runs this installation
of Sonde and nothing else:

- `-I`: neither the working directory nor PYTHONPATH, PYTHONSTARTUP, PYTHONHOME or a user's own
  site-packages decide what it imports; `-S`: no `.pth` file and no `sitecustomize` runs in it;
- its search path is the standard library, the folders that this process imports from, as far as
  nobody else can write there, and the folder that `sonde` was imported from (a wheel, a virtual
  environment and an editable installation alike);
- of the environment, variables by which the dynamic linker, the C library or CUDA load files are
  left out; PATH, LD_LIBRARY_PATH and ROCm's folders keep only those that nobody else can write to;
- its working directory is `/`.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NoReturn

from sonde.ownership import trusted_folders

STARTER: Final = Path(__file__).resolve().with_name("start_module.py")
SEARCH_PATH: Final = "SONDE_CHILD_PATH"
"""Variable with the folders that the child also imports from; `start_module` takes it out again."""
ENDS_FIRST: Final = "SONDE_CHILD_ENDS_FIRST"
"""Variable by which `start_module` gives the child the highest oom_score_adj."""
DEFAULT_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"

GIVEN_UP_AFTER_S: Final = 1.0
"""How long a killed child is waited for."""

_CPU_CLOCK: Final = 2
"""Of a process, in the number of a clock (CPUCLOCK_SCHED of linux/posix-timers_types.h)."""

_given_up: Final[list[subprocess.Popen[bytes]]] = []
_given_up_lock: Final = threading.Lock()

# Variables with folders that are searched; variables that a child does not get.
_SEARCHED: Final = ("PATH", "LD_LIBRARY_PATH", "ROCM_HOME", "ROCM_PATH")
_LEFT_OUT_PREFIXES: Final = ("PYTHON", "LD_", "__PYVENV", "MALLOC_")
_LEFT_OUT: Final = frozenset(
    # The C library's own list of what programs with more rights ignore (unsecvars.h) …
    {"GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH"}
    | {"NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR"}
    # … what device libraries load because of a variable, and what a shell runs.
    | {"CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"}
    | {"BASH_ENV", "ENV", SEARCH_PATH}
)


def command(target: str | Path, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module by its name, or a file alone by its path."""
    return (sys.executable, "-I", "-S", str(STARTER), str(target), *arguments)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of such a child."""
    kept = {name: value for name, value in environ.items() if not _is_left_out(name)}
    for name in _SEARCHED:
        folders = trusted_folders(environ.get(name, "").split(os.pathsep))
        if folders:
            kept[name] = os.pathsep.join(folders)
    kept.setdefault("PATH", DEFAULT_PATH)
    return kept | {SEARCH_PATH: os.pathsep.join(trusted_folders(sys.path))}


def start(
    argv: Sequence[str],
    *,
    stdin: int | None = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    own_session: bool = False,
    ends_first: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child, in `/`, whose standard output is read through a pipe unless `stdout` is given.
    `ends_first`: where memory is short the kernel ends it before its parent. Raises OSError."""
    hanging()
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=own_session,
        env=environment() | ({ENDS_FIRST: "1"} if ends_first else {}),
        cwd="/",
    )


def run(
    argv: Sequence[str], timeout_s: float, *, stdin: str = "", pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a child to its end. Raises OSError, subprocess.TimeoutExpired."""
    child = start(argv, stderr=subprocess.PIPE, pass_fds=pass_fds)
    try:
        out, err = child.communicate(stdin.encode(), timeout_s)
    except BaseException:
        give_up(child)
        raise
    return subprocess.CompletedProcess(argv, child.returncode, out.decode(), err.decode())


def cpu_s(child: subprocess.Popen[bytes]) -> float:
    """CPU time that a child has taken so far, in seconds; 0 of one that has ended."""
    with suppress(OSError):
        return time.clock_gettime(~child.pid << 3 | _CPU_CLOCK)
    return 0.0


def give_up(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and close its pipes, without waiting for one that cannot die.

    A child that waits in the kernel for what somebody else has to answer (a FUSE server, a driver)
    dies only once it has the answer. It is kept, and reaped by a later call of `hanging`.
    """
    child.kill()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        child.wait(GIVEN_UP_AFTER_S)
    except subprocess.TimeoutExpired:
        with _given_up_lock:
            _given_up.append(child)


def run_forked(work: Callable[[], object], timeout_s: float) -> int | None:
    """Do something that may hang in a forked copy of this process, for its effect on what both
    share (open files, shared memory).

    Returns the errno of its OSError, EIO of another error, 0 for none; None where it was killed as
    it took too long. Raises OSError where fork() or pidfd_open() fails.
    """
    child = os.fork()
    if child == 0:
        _leave_after(work)
    pidfd = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            os.kill(child, signal.SIGKILL)
            if poll.poll(GIVEN_UP_AFTER_S * 1000):
                os.waitpid(child, 0)
            return None  # one that cannot die is not waited for, and not reaped
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(pidfd)


def is_readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read, or an end, within this time. By poll(): select() refuses
    numbers from 1,024 on, which a process with many open files has."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _leave_after(work: Callable[[], object]) -> NoReturn:
    """In the copy: do the work and exit, without returning to the caller."""
    number = errno.EIO
    try:
        os.setsid()
        os.closerange(0, 3)  # else a reader of our output would wait for the copy, too
        work()
        number = 0
    except OSError as error:
        number = error.errno or errno.EIO
    finally:
        os._exit(number)


def leave_fork() -> NoReturn:
    """In a forked copy that has done its work: run exit handlers, which remove temporary files, and
    exit. To free all objects first, as an interpreter does, takes as long as many an answer."""
    atexit._run_exitfuncs()
    os._exit(0)


def hanging() -> int:
    """How many children were killed and have not died yet; those that have are reaped."""
    with _given_up_lock:
        _given_up[:] = [child for child in _given_up if child.poll() is None]
        return len(_given_up)


def _is_left_out(name: str) -> bool:
    return name in _LEFT_OUT or name in _SEARCHED or name.startswith(_LEFT_OUT_PREFIXES)
