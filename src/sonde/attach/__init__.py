# SPDX-License-Identifier: Apache-2.0
"""Bringing a library into a process that already runs: no restart, and no harm.

    process   may it be done to this one, and by us?
    glibc     where its C library keeps what a load needs, out of its memory
    threads   which of its threads sleeps where it may be borrowed
    seccomp   whether a thread's filters let a load pass
    tracer    the attach, in a separate process
    remote    starts that process, and turns its answer into words

docs/design/attach.md explains why it is safe, with figures.
"""

from __future__ import annotations
