# SPDX-License-Identifier: Apache-2.0
"""The long lists of the JSON document, as columns: processes, functions, waits, usage.

Fields are those of `sonde.model.answers`; those of a process are in place of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.export.json_columns import Coded, Column, Rows
from sonde.model.answers import FunctionUse, ProcessUse, Usage
from sonde.model.owner import OWNER_COLUMNS
from sonde.model.profile import ProfileKind
from sonde.model.wait_lengths import WaitLengths
from sonde.query import queries
from sonde.query.queries import Where
from sonde.query.session import Session

I64 = npt.NDArray[np.int64]

_FLAGS = (False, True)


def processes(session: Session, where: Where) -> Rows:
    """What each process did."""
    uses = queries.processes(session, where)
    return _of_processes(session, uses.columns, [field.name for field in fields(ProcessUse)])


def usage(session: Session, where: Where) -> Rows:
    """What each process used by the kernel's own counters."""
    uses = queries.usage(session, where)
    return _of_processes(session, uses.columns, [field.name for field in fields(Usage)])


def functions(session: Session, kind: ProfileKind, where: Where) -> Rows:
    """Functions by self time."""
    numbers, frames, *sums = queries.top_functions(session, kind, where).columns
    known = session.functions
    keys = zip(*(known[number] for number in numbers.tolist()), strict=True)
    texts = [list(column) for column in keys] or [[], [], []]
    every = session.stacks.frames
    locations = [every[frame].location if frame >= 0 else "" for frame in frames.tolist()]
    at = np.arange(len(numbers))
    columns: list[Column] = [Coded(column, at) for column in texts]
    columns += [*sums, Coded(locations, at)]
    names = [field.name for field in fields(FunctionUse)]
    return Rows(dict(zip(names, columns, strict=True)))


def waits(session: Session, kinds: Sequence[ProfileKind], where: Where) -> Rows:
    """Waits of threads by reason."""
    every = queries.waits(session, where)
    rows = every.of_kinds(kinds)
    threads = session.threads
    thread = every.thread[rows]
    names, of_thread = threads.coded_names
    hints, hint = every.hints(rows)
    single = every.lengths(rows)
    about: dict[str, Column] = {
        **_process(session, threads.process[thread]),
        "tid": threads.tid[thread],
        "thread": Coded(names, of_thread[thread]),
        "kind": Coded(every.kinds, every.kind[rows]),
        "reason": Coded(every.reasons, every.reason[rows]),
        "system_call": Coded(every.system_calls, every.system_call[rows]),
        "count": every.events[rows],
        "ns": every.ns[rows],
        "max_ns": every.max_ns[rows],
        "waker": Coded(*every.wakers(rows)),
        "idle": Coded(_FLAGS, every.idle[rows].astype(np.int8)),
        "hint": Coded([one.function for one in hints], hint),
        "hint_binary": Coded([one.binary for one in hints], hint),
        "location": Coded([one.location for one in hints], hint),
        "of_sonde": Coded(_FLAGS, every.of_sonde[rows].astype(np.int8)),
        **{
            f"single_{field.name}": np.array([getattr(one, field.name) for one in single], np.int64)
            for field in fields(WaitLengths)
        },
    }
    return Rows(about)


def _of_processes(
    session: Session, columns: Sequence[npt.NDArray[Any]], names: Sequence[str]
) -> Rows:
    """Rows whose first column is the number of a process; `names`: of the columns."""
    process, *others = columns
    return Rows({**_process(session, process), **dict(zip(names[1:], others, strict=True))})


def _process(session: Session, process: I64) -> dict[str, Column]:
    """The fields of processes by their numbers."""
    known = session.processes
    owners = [{name: getattr(owner, name) for name in OWNER_COLUMNS} for owner in known.owners]
    comms, comm = known.coded("comm")
    exes, exe = known.coded("exe")
    commands, command = known.coded("command")
    return {
        "pid": known.pid[process],
        "start_ns": known.start_ns[process],
        "ppid": known.ppid[process],
        "comm": Coded(comms, comm[process]),
        "exe": Coded(exes, exe[process]),
        "command": Coded(commands, command[process]),
        "owner": Coded(owners, known.owner[process]),
    }
