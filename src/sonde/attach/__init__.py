# SPDX-License-Identifier: Apache-2.0
"""Bringing a library into a process that already runs: no restart, and no harm.

    process   whether it may be done to this process, and by us
    glibc     where its C library has what a load needs, read from its memory
    threads   which of its threads sleep where they may be borrowed
    seccomp   whether a thread's filters allow the system calls of a load
    tracer    the attach, in a separate process
    remote    starts that process, and turns its answer into a result or an error

docs/design/attach.md explains why it is safe, with figures.

Terms:
- load: one remote dlopen in another process
- borrow: to stop a sleeping thread by ptrace, run one call on it, and restore it; a thread that
  sleeps where that does no harm is a `Sleeper`
- landmarks: addresses in the C library and the dynamic linker that a load needs
- loader: the dynamic linker (ld.so)
- kill switch: a file that forbids to load anything into a process of this machine
- policy: which processes the operator allows device time for
- build: a build of CUPTI; proved: tried beforehand, with good results
- passed over: of a thread, not borrowed; put back: restored, before or after its call
- answer: what became of a load (loaded, refused, failed, gone); disturbed: a thread that was
  stopped for nothing; price: what a trace by CUPTI costs the program
"""

from __future__ import annotations
