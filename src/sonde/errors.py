# SPDX-License-Identifier: Apache-2.0
"""The exceptions that Sonde raises.

```
SondeError                    cause + remedy + exit code
├── UsageError                exit 2: the call was wrong (unknown pid, bad value, no such format)
│   ├── CommandNotFound       exit 127, as from a shell: there is no such program to record
│   └── CommandNotExecutable  exit 126, as from a shell: the program cannot be executed
├── HostError                 exit 3: this machine cannot, with the remedy
│   ├── PermissionDenied      a capability is missing: which one, and how to grant it
│   ├── KernelUnsupported     no BTF, lockdown, a feature the kernel lacks
│   ├── MissingDependency     a library or program that the command needs
│   └── TargetRefused         no library can be injected here (static, traced, …)
│       └── TargetStopped     not now: the process is stopped by a signal or a debugger
├── CaptureError              exit 1: a capture cannot be read
│   ├── NotACapture           foreign file
│   ├── CaptureTruncated      nothing readable is left (a cut tail alone is a warning, not an error)
│   ├── CaptureTooNew         written by a newer version
│   └── CaptureTooLarge       takes more memory than is allowed: damaged, hostile, or very long
├── AttachFailed              exit 1: the attempt failed; the process is unharmed
│   ├── TracerFailed          the child that attaches does not work, with any target
│   └── ProcessGone           the process ended meanwhile
├── SinkError                 exit 1: output cannot be written (disk full, no permission)
└── InternalError             exit 1: a bug in Sonde, reported as such
```

A message is one line; a remedy is one imperative sentence. Only `sonde.cli` prints them.
"""

from __future__ import annotations


class SondeError(Exception):
    """Base of every error that Sonde raises: the cause and how to fix it."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause} ({self.remedy})" if self.remedy else self.cause


class UsageError(SondeError):
    """The command or function was called with wrong arguments."""

    exit_code = 2


class CommandNotFound(UsageError):
    """There is no such program to record."""

    exit_code = 127


class CommandNotExecutable(UsageError):
    """The program to record cannot be executed."""

    exit_code = 126


class HostError(SondeError):
    """This machine does not support or allow it."""

    exit_code = 3


class PermissionDenied(HostError):
    """A capability is missing."""


class KernelUnsupported(HostError):
    """The running kernel lacks what is needed."""


class MissingDependency(HostError):
    """A library or program is missing."""


class TargetRefused(HostError):
    """No library can be injected into this process."""


class TargetStopped(TargetRefused):
    """Not possible now: the process is stopped by a signal or a debugger."""


class AttachFailed(SondeError):
    """Attaching to a process failed; the process is unharmed."""


class TracerFailed(AttachFailed):
    """The child that attaches does not work, with any target."""


class ProcessGone(AttachFailed):
    """The process ended meanwhile."""


class CaptureError(SondeError):
    """A capture cannot be read."""


class NotACapture(CaptureError):
    """The file is no Sonde capture."""


class CaptureTruncated(CaptureError):
    """The file ends before its first whole chunk."""


class CaptureTooNew(CaptureError):
    """A newer Sonde wrote the file."""


class CaptureTooLarge(CaptureError):
    """A file takes more memory to read than is allowed."""


class SinkError(SondeError):
    """Output could not be written."""


class InternalError(SondeError):
    """A bug in Sonde itself."""
