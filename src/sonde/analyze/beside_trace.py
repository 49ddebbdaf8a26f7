# SPDX-License-Identifier: Apache-2.0
"""Names code in the verdict on a trace, by the capture that was made beside it.

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
