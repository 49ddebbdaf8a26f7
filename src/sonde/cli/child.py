# SPDX-License-Identifier: Apache-2.0
"""The command after `--`: forked early, executed once the probes are attached.

The child is forked early, so that probes for its pid can be attached before it executes the
program; it waits at a pipe until `start()`. Under sudo it runs as the user who called sudo, with
that user's environment and groups and without capabilities, as it would without sudo. It stays in
this process's group, so the terminal's Ctrl-C reaches it directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import shlex
import shutil
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from sonde import procfs
from sonde.cli import abort_signals, pause_signals
from sonde.errors import CommandNotExecutable, CommandNotFound, UsageError
from sonde.model.program_run import ProgramRun

_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_NOT_STARTED = 127
"""Exit status of a child that did not execute its program, as of shells."""
_DEFAULT = (
    *(signal.SIGINT, signal.SIGTERM, *pause_signals.SIGNALS),
    *(signal.SIGPIPE, signal.SIGXFSZ),  # which Python ignores
)
"""Signals that get their default action again before the program is executed."""


class Child:
    """A command that is forked and ready to execute."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        extra_environ: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None,
    ) -> None:
        """Find the program and fork. Raises CommandNotFound, UsageError.

        `extra_environ`: returns variables to add to the environment that the program gets.
        """
        self.command = list(command)
        self.run: ProgramRun | None = None
        """Its resource usage and status; None while it runs."""
        self._started_ns = 0
        self._user = invoking_user(environ)
        self._environ = dict(environ)
        if self._user is not None:
            self._environ = environment_before_sudo(self._user, environ)
        if extra_environ is not None:
            self._environ |= extra_environ(self._environ)
        path = self._environ.get("PATH", os.defpath)
        program = shutil.which(self.command[0], path=path)
        if program is None:
            if shutil.which(self.command[0], os.F_OK, path):
                raise CommandNotExecutable(
                    f"cannot run {self.command[0]}: {os.strerror(errno.EACCES)}",
                    "Make it executable: chmod +x, or name the interpreter that runs it.",
                )
            raise CommandNotFound(
                f"there is no program {self.command[0]}", "Check its name, or give its whole path."
            )
        self.program = program
        """Path of the program."""
        gate_read, self._gate = os.pipe()
        # Python's descriptors are close-on-exec: end of file in this pipe is a successful exec.
        self._error, error_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            self._execute(gate_read, error_write)
        os.close(gate_read)
        os.close(error_write)

    def __str__(self) -> str:
        return shlex.join(self.command)

    def start(self) -> None:
        """Execute the program. Raises CommandNotExecutable where the kernel refuses to."""
        self._started_ns = time.monotonic_ns()
        os.write(self._gate, b"x")
        self._close_gate()
        with os.fdopen(self._error, "rb") as pipe:
            error = pipe.read()
        if error:
            self.reap(wait=True)
            (number,) = struct.unpack("<i", error)
            raise CommandNotExecutable(
                f"cannot run {self.program}: {os.strerror(number)}",
                "Check that it is a program, and that the user it runs as may execute it.",
            )

    def abandon(self) -> None:
        """End a child that was never started; does nothing where `start` was called."""
        if self._gate >= 0:
            self._close_gate()
            os.close(self._error)
            self.reap(wait=True)

    def send(self, number: int) -> None:
        """Send the child a signal; no error where it has ended."""
        if self.run is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def reap(self, *, wait: bool = False) -> bool:
        """Whether the child has ended; `wait`: block until it has."""
        if self.run is None:
            pid, status, used = os.wait4(self.pid, 0 if wait else os.WNOHANG)
            if pid:
                now_ns = time.monotonic_ns()
                self.run = ProgramRun(
                    wall_ns=now_ns - (self._started_ns or now_ns),
                    user_ns=round(used.ru_utime * 1e9),
                    system_ns=round(used.ru_stime * 1e9),
                    peak_rss_bytes=used.ru_maxrss * 1024,
                    status=os.waitstatus_to_exitcode(status),
                )
        return self.run is not None

    def how_it_ended(self) -> str:
        """'exited with 0', 'was ended by SIGSEGV', 'still runs (pid 4711)'."""
        if self.run is None:
            return f"still runs (pid {self.pid})"
        status = self.run.status
        if status < 0:
            try:
                return f"was ended by {signal.Signals(-status).name}"
            except ValueError:
                return f"was ended by signal {-status}"
        return f"exited with {status}"

    def _close_gate(self) -> None:
        os.close(self._gate)
        self._gate = -1

    def _execute(self, gate: int, error: int) -> None:
        """In the child: wait for `start`, change to the user, execute. Never returns."""
        try:
            # The terminal's Ctrl-C belongs to the recorder alone until there is a command.
            for number in _DEFAULT:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, {*pause_signals.SIGNALS, *abort_signals.SIGNALS}
            )
            if not os.read(gate, 1):
                os._exit(_NOT_STARTED)  # the recorder gave up or died
            if self._user is not None:
                os.initgroups(self._user.pw_name, self._user.pw_gid)
                os.setgid(self._user.pw_gid)
                os.setuid(self._user.pw_uid)
            ctypes.CDLL(None).prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
            os.execve(self.program, self.command, self._environ)
        except OSError as problem:
            os.write(error, struct.pack("<i", problem.errno or 0))
        finally:
            os._exit(_NOT_STARTED)


def invoking_user(environ: Mapping[str, str]) -> pwd.struct_passwd | None:
    """The user who called sudo; None where nobody did, or root did. Raises UsageError for a user
    whom the machine does not know: what that one meant to run must not run as root."""
    caller = environ.get("SUDO_UID", "")
    if os.geteuid() != 0 or not caller.isdecimal() or int(caller) == 0:
        return None
    try:
        return pwd.getpwuid(int(caller))
    except (KeyError, OverflowError):
        raise UsageError(
            f"this machine knows no user {caller}, who called sudo (SUDO_UID)",
            "to run the command as root: env -u SUDO_UID sonde record -- COMMAND",
        ) from None


def environment_before_sudo(
    user: pwd.struct_passwd, environ: Mapping[str, str], pid: int | None = None
) -> dict[str, str]:
    """The environment that sudo was called with, read from sudo's own process.

    sudo clears most variables (PATH, VIRTUAL_ENV, LD_LIBRARY_PATH, …), so another program than the
    user meant could run. Where no ancestor of `pid` (default: this process) is sudo, the present
    environment is used, with the user's home and name.
    """
    for parent in procfs.parents(pid or os.getpid()):
        if (procfs.read_file(f"/proc/{parent}/comm") or b"").strip() != b"sudo":
            continue
        raw = procfs.read_file(f"/proc/{parent}/environ", 1 << 22)
        if raw is None:
            continue
        pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    kept = {name: value for name, value in environ.items() if not name.startswith("SUDO_")}
    return kept | {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
