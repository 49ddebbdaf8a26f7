# SPDX-License-Identifier: Apache-2.0
"""Resolves addresses to frames, pids to processes, and processes to their owners.

`Resolver` is the public interface: it takes process events, and returns processes, threads and
frames. Everything it keeps is bounded; `Counters` counts what was evicted or could not be named.
Full paths never leave this package: frames show file names.

Terms:
- owner: the pod, job, container, unit or user that a process belongs to
- image: the mappings of a process from one execve to the next; pending: not parsed yet
- binary: a file with code, held open; identity: device, inode, size and times of it
- inner pid: the pid that a process has in its own pid namespace
- perf map: the file in which a process names its just-in-time compiled code
- naming budget: CPU time that one party's names may take; put off: looked up again later
- claim: a path that leads to a file with a build id, and whose that is, in claims.py; public: for
  everybody to read, as the file is
- mark (of a build id): that others believe no user's file with it, in dispute_marks.py
- note: a record of the kernel about whose a process is
- party: a user or container, as budgets are shared; delegated: of a control group in which somebody
  other than root makes groups
- headless: a process whose first thread has ended while others run
- in turn: of the files of each party one after the other; (of a budget) within its part of a tick
"""

from sonde.model.code import KnownFrame
from sonde.resolve.counters import Counters
from sonde.resolve.resolver import Resolver

__all__ = ["Counters", "KnownFrame", "Resolver"]
