# SPDX-License-Identifier: Apache-2.0
"""One next step for each cause: data."""

from __future__ import annotations

from collections.abc import Mapping

NEXT: Mapping[str, str] = {
    "stopped": "find who stops the process: signals, a debugger, a freezer of its control group",
    "run queue": "give the launching thread a CPU of its own: pin it, or move the rivals away",
    "run queue/quota": "raise its CPU quota: it is spent before each period ends",
    "input": "prepare batches ahead and in parallel: more loader workers, prefetching, less work "
    "per sample",
    "allocation": "keep memory: no empty_cache() in the loop, fixed shapes, expandable segments, "
    "or a larger pool",
    "build": "compile and load kernels before the loop, and cache them",
    "page fault": "reuse host buffers instead of mapping new ones, or touch them ahead; huge pages",
    "gil": "move the other Python threads' work into processes",
    "lock": "hold the lock for less, or keep it away from the thread that launches",
    "io": "do it in another thread or process, off the launching thread's way",
    "sleep": "remove the sleep from the launching thread",
    "synchronisation": "read results back later or less often: keep them on the device, copy "
    "non-blocking, log every n-th step",
    "copy": "copy from pinned memory on a stream of its own, a batch ahead",
    "copy/pageable": "pin the host memory and copy non-blocking, a batch ahead",
    "copy/small": "gather small copies into one, or make the values on the device",
    "copy/bandwidth": "send fewer bytes (smaller types, decode on the device) or copy a batch "
    "ahead on a stream of its own",
    "collective": "overlap communication with computing; look for the rank that comes last",
    "launch": "launch less: CUDA graphs, torch.compile, fused kernels, larger batches",
    "short": "fuse small kernels, or put them into one CUDA graph",
    "host": "take this code out of the loop, make it faster, or run it while the device works",
    "rival": "give the process the device alone, or share it by MPS or MIG",
    "unknown": "record with Sonde beside the profiler: it tells why threads were off their CPU",
    "compute": "use fewer or cheaper operations: lower precision, sparsity, a better kernel for "
    "the first one",
    "kernels": "make the first kernel faster: a counter-level profiler tells what it lacks",
    "memory": "move fewer bytes: fuse elementwise work (torch.compile), smaller types, "
    "recompute instead of reload",
    "device": "look at what the device does: trace it (torch.profiler) and explain the trace with "
    "this capture",
    "throttled/heat": "cool it: look at fans, airflow, inlet temperature, and what heats beside it",
    "throttled": "raise its power limit where the board allows it, or use fewer operations: its "
    "power, not its arithmetic, is spent",
    "serial": "run independent kernels on several streams at once, batch them, or make each larger",
}


def next_step(key: str, detail: str = "") -> str:
    """What to do about a cause, or about the work of kernels."""
    return NEXT.get(f"{key}/{detail}") or NEXT[key]
