# SPDX-License-Identifier: Apache-2.0
"""A slow file system: files are served by a process, over FUSE or the like.

Looks like: threads wait in reads, writes or opens until another process answers, and no request of
theirs reaches a disk. What to do: look at that process, or copy the files to a local disk.
"""

from __future__ import annotations

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.thread_time import Part

LEAST = 0.05


def judge(case: Case) -> Candidate | None:
    """Waits for files that a process which serves a file system ended."""
    servers = set(case.last.file_servers) | set(case.first.file_servers)
    served = [(pid, s) for pid, _, s in case.wakers(Part.SERVED, Part.DISK) if pid in servers]
    lost = sum(seconds for _, seconds in served)
    if lost < LEAST:
        return None
    pid = served[0][0]
    text = f"answered for {lost:.2f} s more of each second, and has /dev/fuse open"
    share = case.lost.share(Part.SERVED, Part.DISK)
    evidence = (
        f"waited {lost:.2f} s more of each second for files that {case.name(pid)} ({pid}) serves",
    )
    step = f"Look at {case.name(pid)} and at what it gets its files from."
    offender = case.offender(pid, text, 1.0)
    return Candidate(FaultCause.SLOW_FILE_SYSTEM, share, evidence, (), offender, step)
