# SPDX-License-Identifier: Apache-2.0
"""The composition root of a node: the only package that joins collectors, resolver and sinks.

Terms:
- tick: the regular moment of draining the collectors, 1 s by default
- rest: to do little while the machine does next to nothing
- batch, chunk: what one drain of one collector gives; a few seconds of rows, as they are written
- given processes: those that a recording is of (`config.pids`), with their descendants
- chosen processes: those whose stacks or waits diagnosis takes at present (`Kernel.choose`)
- process events: the kernel's reports of forks, execs, exits and mapped files
- names code: of an agent: it names the frames of stacks, for a sink or for diagnosis; one for
  metrics alone does not
- walk, raw stack: a stack as the kernel unwound it; a `StackReader` names its frames
- moment: the rows of one tick, summed by process, for diagnosis
- look: one reading of something that is read again and again, such as all ranks' stacks
- party: a user or a container; what all share is divided between parties
- left out: what a bound kept out of the result, counted; targets: the processes that BPF programs
  watch (prefix of losses)
- holder: the user whose subordinate ids (/etc/subuid) those of a container are
- page: what the agent serves its metrics on (`sinks`)
- quiet: of a job: its ranks make no progress; such a stretch is a pause, or found to be a stall
- change: a slowdown that is no fault, as the work itself changed (`diagnose`)
- symptom: what shows that a rank has stopped; numbered by: what gave the ranks their numbers
- outcome: what became of an attach, or of a push of metrics; identity: pid and start of a process
- table: rows of one kind (`abi/tables.json`); alone, of a walk: its unwind rules (`unwind`)
- to wake: to end the agent's sleep before its next tick; we, ours: of Sonde itself
- resync: a look at everything again, after events were lost; setup: what collectors are made from
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.agent.agent import Agent
    from sonde.agent.diagnosis_agent import DiagnosisAgent
    from sonde.agent.protocols import Live, Observer, Sink

_MODULES = {
    "Agent": "agent",
    "DiagnosisAgent": "diagnosis_agent",
    **dict.fromkeys(("Live", "Observer", "Sink"), "protocols"),
}


def __getattr__(name: str) -> object:
    """Import what is asked for: most of an agent is imported while other threads load its BPF
    programs, which `registry` begins."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["Agent", "DiagnosisAgent", "Live", "Observer", "Sink"]
