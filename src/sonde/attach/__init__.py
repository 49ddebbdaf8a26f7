# SPDX-License-Identifier: Apache-2.0
"""Bringing a library into a process that already runs: no restart, and no harm.

    process   may it be done to this one, and by us?
    glibc     where its C library keeps what a load needs, out of its memory
    threads   which of its threads sleeps where it may be borrowed
    seccomp   whether a thread's filters let a load pass
    tracer    the attach, in a separate process
    remote    starts that process, and turns its answer into words

docs/design/attach.md explains why it is safe, with figures.

Terms:
- load: one remote dlopen in another process
- borrow: to stop a sleeping thread by ptrace, run one call on it, and restore it; a thread that
  sleeps where that does no harm is a `Sleeper`
- landmarks: addresses in the C library and the dynamic linker that a load needs
- loader: the dynamic linker (ld.so)
- kill switch: a file that forbids to bring anything into a process of this machine
- policy: which processes the operator allows device time for
- build: a build of CUPTI, proved where it was tried
- answer: what became of a load (loaded, refused, failed, gone); disturbed: a thread that was
  stopped for nothing; price: what a trace by CUPTI costs the program
"""

from __future__ import annotations
