# SPDX-License-Identifier: Apache-2.0
"""Which processes are looked at closely."""

from __future__ import annotations

from sonde.diagnose.moments import Moment, ProcessMoment, Usage
from sonde.diagnose.selection import KNOWN, Selection

TICK_NS = 250_000_000
CHOSEN = 7


def take(selection: Selection, tick: int, cpu_ns: dict[int, int]) -> None:
    """A tick in which the processes used these CPU times."""
    processes = {pid: ProcessMoment(usage=Usage(cpu_ns=ns)) for pid, ns in cpu_ns.items()}
    start_ns = 10**10 + tick * TICK_NS
    selection.take(Moment(start_ns, start_ns + TICK_NS, processes), {}, set())


def test_a_chosen_process_stays_so_while_more_than_are_known_use_a_cpu() -> None:
    selection = Selection()
    for tick in range(8):
        take(selection, tick, {CHOSEN: TICK_NS // 2})
    assert selection.pids == {CHOSEN: True}

    take(selection, 8, dict.fromkeys(range(100, 101 + KNOWN), 1000))
    take(selection, 9, {CHOSEN: 1000})

    assert selection.pids == {CHOSEN: True}
