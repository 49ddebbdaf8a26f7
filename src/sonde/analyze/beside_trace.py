# SPDX-License-Identifier: Apache-2.0
"""Names code in the verdict on a trace, and want of a CPU, by the capture that was made beside it.

A trace of a running process knows each kernel, copy and call, and no function of the program. The
capture has totals of its threads by cause, with the code that each part is in, and who ended waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sonde.model.causes import Cause
from sonde.model.verdict import CauseShare

_SAME: Mapping[Cause, Sequence[Cause]] = {
    Cause.SYNCHRONIZATION: (Cause.COPY,),
    Cause.COPY: (Cause.SYNCHRONIZATION,),
    Cause.GPU_CONTENTION: (Cause.SYNCHRONIZATION, Cause.COPY),
    Cause.NOT_TAKEN: (Cause.SYNCHRONIZATION, Cause.COPY),
    Cause.HOST: (Cause.LAUNCH,),
    Cause.LAUNCH: (Cause.HOST,),
}
"""Where a thread has no time of a cause: what shows the same stalls in its stacks. A copy to the
host is a wait for what it copies; a framework's dispatch may show as the code that calls it."""


def with_code(
    causes: Iterable[CauseShare], threads: Mapping[str, Mapping[Cause, CauseShare]]
) -> list[CauseShare]:
    """The causes with the code of their threads, and with who ended their waits, where a trace
    names none. `threads`: by label, as `thread_verdicts.causes_of_threads` has them."""
    found = []
    for one in causes:
        mine = threads.get(one.thread, {})
        keys = (one.key, *_SAME.get(one.key, ()))
        part = next((mine[key] for key in keys if key in mine and mine[key].locations), None)
        if part is not None and not one.locations:
            facts = part.facts if part.key == one.key else []
            one = replace(one, locations=part.locations, facts=[*one.facts, *facts])
        found.append(one)
    return found


def with_run_queue(
    causes: Iterable[CauseShare], threads: Mapping[str, Mapping[Cause, CauseShare]]
) -> list[CauseShare]:
    """The causes with the time in which a thread waited for a CPU apart from its code.

    Such waits are short and many, and single ones are not in a capture. Its totals have them: the
    code between launches is split as the thread's time is between code and these waits, less those
    that are known singly.
    """
    known = {one.key: one for one in causes}
    host = known.get(Cause.HOST)
    mine = threads.get(host.thread, {}) if host else {}
    if host is None or Cause.HOST not in mine or Cause.RUN_QUEUE not in mine:
        return list(known.values())
    singly = known.get(Cause.RUN_QUEUE)
    waited = max(0.0, mine[Cause.RUN_QUEUE].share - (singly.share if singly else 0.0))
    ns = round(host.ns * waited / max(1e-9, waited + mine[Cause.HOST].share))
    if not ns:
        return list(known.values())
    share = host.share * ns / host.ns
    whole = ns + (singly.ns if singly else 0), share + (singly.share if singly else 0.0)
    known[Cause.RUN_QUEUE] = replace(mine[Cause.RUN_QUEUE], ns=whole[0], share=whole[1])
    known[Cause.HOST] = replace(host, ns=host.ns - ns, share=host.share - share)
    return sorted(known.values(), key=lambda one: -one.ns)
