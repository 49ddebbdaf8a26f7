# SPDX-License-Identifier: Apache-2.0
"""What a thread did, by its stack: on a device's launch path, or in code, and in whose.

The part of a stack inside the program's innermost own Python frame decides: what did that line
call? Stacks without own Python code (a framework's backward thread, a C++ program) decide as a
whole. All columns are computed for all stacks at once: a capture may have 200,000.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.call_kinds import kind_by_name
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.model.timeline import I32, I64, U8, Activity, CallKind, Mask, ThreadOwner

ACTIVITIES: tuple[Activity, ...] = tuple(Activity)
"""The activity of each number in columns."""
_CODE = {one: number for number, one in enumerate(ACTIVITIES)}
_OF_CALL = {
    CallKind.SYNC: Activity.DEVICE_WAIT,
    CallKind.COPY: Activity.COPY,
    CallKind.ALLOC: Activity.ALLOCATION,
    CallKind.FREE: Activity.ALLOCATION,
    CallKind.PIN: Activity.ALLOCATION,
    CallKind.BUILD: Activity.BUILD,
}
_ENTRY = re.compile(r"^(cuda|cu|hip|cl|ze)[A-Z]\w*$")
"""Functions of device APIs."""
_CPU_KINDS = (
    *(CodeKind.DEVICE, CodeKind.DISPATCH, CodeKind.CPU_KERNEL, CodeKind.COMPILER),
    *(CodeKind.LIBRARY, CodeKind.OWN_NATIVE, CodeKind.OWN_PYTHON, CodeKind.HAND_OVER),
    CodeKind.STORAGE,
)
"""Kinds whose innermost frame shows what the CPU does."""


@dataclass(frozen=True, slots=True)
class StackRoles:
    """Of each row of the table of stacks, and one more for stacks that are not in it."""

    activity: U8
    """Index into `ACTIVITIES`, for a thread on a CPU."""
    place: I32
    """Index into `places` of the program's innermost own code, -1 none."""
    places: list[str]
    """'function file:line', or a function of machine code."""
    caller: I32
    """Index into `places` of the program's own function around that one, -1 none."""
    hands_over: Mask
    """The stack waits in a queue, a future or a condition."""
    interpreter: Mask
    """The interpreter itself waits in a condition: on Linux, CPython does for its lock alone."""
    exchanges: Mask
    """The stack is in a library that exchanges data with other processes of the job."""
    bare: Mask
    """The program's own Python code is innermost, but for the interpreter and the system."""
    computes: Mask
    """The stack is in a computation on the CPU, which may run in several threads."""
    owner: U8
    """1 + the number of the `ThreadOwner` that the outermost code belongs to; 0 not known."""


def stack_roles(frame: pa.Table, flat: I64, parents: I64, stacks: int) -> StackRoles:
    """The roles of all stacks.

    `flat`: row of each frame of all stacks, innermost first, -1 unknown; `parents`: the stack of
    each, ascending; `stacks`: their number.
    """
    kinds, calls, places, place_of = _frames(frame)
    kind = np.where(flat >= 0, kinds[flat], CodeKind.NEUTRAL).astype(np.uint8)
    call = np.where(flat >= 0, calls[flat], 0).astype(np.uint8)
    at = np.arange(len(flat))

    def first(rows: Mask) -> I64:
        """Position of the innermost such frame of each stack; len(flat) none."""
        found = np.full(stacks + 1, len(flat), np.int64)
        where = at[rows]
        found[parents[where][::-1]] = where[::-1]
        return found

    def has(rows: Mask) -> Mask:
        return np.bincount(parents[rows], minlength=stacks + 1) > 0

    own = first(kind == CodeKind.OWN_PYTHON)
    inner = at < own[parents] if len(flat) else np.zeros(0, bool)
    is_cpu = np.isin(kind, _CPU_KINDS)
    leaf = first(is_cpu & (at <= own[parents]) if len(flat) else is_cpu)
    leaf_kind = np.where(leaf < len(flat), np.append(kind, 0)[leaf], 0)
    compiled = has(inner & (kind == CodeKind.COMPILER))
    in_device = has(inner & (kind == CodeKind.DEVICE))
    in_dispatch = has(inner & (kind == CodeKind.DISPATCH))
    on_cpu = has(inner & (kind == CodeKind.CPU_KERNEL))
    stores = has(inner & (kind == CodeKind.STORAGE))
    loads = has(kind == CodeKind.LOADER)
    # The outermost entry into the device's API shows what was asked for.
    entry = np.zeros(stacks + 1, np.uint8)
    entries = at[inner & (kind == CodeKind.DEVICE) & (call > 0)]
    entry[parents[entries]] = call[entries]  # the last one stays
    # A library between the framework and the CPU (an image codec, NumPy) is no launch path.
    launches = in_device | (
        in_dispatch & ~on_cpu & ~stores & np.isin(leaf_kind, (CodeKind.DISPATCH, CodeKind.DEVICE))
    )
    activity = np.full(stacks + 1, _CODE[Activity.CODE], np.uint8)
    activity[leaf >= len(flat)] = _CODE[Activity.UNKNOWN]
    alone = in_device & ~in_dispatch & (own >= len(flat)) & (entry == 0)
    activity[alone] = _CODE[Activity.UNKNOWN]  # somewhere in the driver; the rest is missing
    launches &= ~alone
    activity[launches] = _CODE[Activity.LAUNCH_PATH]
    exchanges = has(inner & (kind == CodeKind.EXCHANGE)) & ~in_device
    activity[exchanges] = _CODE[Activity.EXCHANGE]
    activity[compiled] = _CODE[Activity.BUILD]
    for number, kind_of_call in enumerate(CallKind):
        if kind_of_call in _OF_CALL:
            chosen = in_device & ~compiled & (entry == number + 1)
            activity[chosen] = _CODE[_OF_CALL[kind_of_call]]
    activity[loads] = _CODE[Activity.INPUT]
    place = np.full(stacks + 1, -1, np.int32)
    native = first(kind == CodeKind.OWN_NATIVE)
    library = first(np.isin(kind, (CodeKind.LIBRARY, CodeKind.STORAGE, CodeKind.DISPATCH)))
    for found in (library, native, own):
        known = found < len(flat)
        named = place_of[flat[found[known]]] if known.any() else np.zeros(0, np.int32)
        place[np.flatnonzero(known)[named >= 0]] = named[named >= 0]
    caller = _callers(frame, flat, parents, kind == CodeKind.OWN_PYTHON, own, place_of)
    waits = has((kind == CodeKind.HAND_OVER) & (at <= own[parents]) if len(flat) else is_cpu)
    waits &= ~in_dispatch & ~in_device  # a framework waits for its own threads
    python = np.append(pc.equal(frame.column("kind"), "python").to_numpy(), False)[flat]
    in_condition = inner & (kind == CodeKind.HAND_OVER) & ~python
    beside = inner & (kind != CodeKind.NEUTRAL) & ~in_condition
    interpreter = has(in_condition) & ~has(beside) & (own < len(flat))
    waits &= ~interpreter
    bare = (own < len(flat)) & ~has(inner & (kind != CodeKind.NEUTRAL))
    owners = _owners(kind, parents, stacks)
    return StackRoles(
        activity, place, places, caller, waits, interpreter, exchanges, bare, on_cpu, owners
    )


def _callers(
    frame: pa.Table, flat: I64, parents: I64, is_own: Mask, own: I64, place_of: I32
) -> I32:
    """The place of the innermost own frame outside of the function of frame `own`, of each stack.

    A module is left out: it calls everything.
    """
    columns = (frame.column(name).to_pylist() for name in ("function", "file"))
    texts = list(zip(*columns, strict=True))
    known: dict[tuple[str, str], int] = {}
    number = np.array([known.setdefault(text, len(known)) for text in texts] + [-1], np.int64)
    whole = np.array([function != "<module>" for function, _ in texts] + [False])
    mine = np.append(number[flat], -1)[own]
    rows = np.flatnonzero(is_own & whole[flat])
    rows = rows[(rows > own[parents[rows]]) & (number[flat[rows]] != mine[parents[rows]])]
    caller = np.full(len(own), -1, np.int32)
    caller[parents[rows][::-1]] = place_of[flat[rows]][::-1]
    return caller


def _owners(kind: U8, parents: I64, stacks: int) -> U8:
    """By the outermost code of a stack: the driver calls the program's functions back."""
    outermost = np.zeros(stacks + 1, np.uint8)
    rows = np.flatnonzero(kind != CodeKind.NEUTRAL)
    outermost[parents[rows]] = kind[rows]
    owners = list(ThreadOwner)
    owner = np.where(outermost > 0, 1 + owners.index(ThreadOwner.PROGRAM), 0).astype(np.uint8)
    owner[outermost == CodeKind.DEVICE] = 1 + owners.index(ThreadOwner.DRIVER)
    owner[outermost == CodeKind.SONDE] = 1 + owners.index(ThreadOwner.SONDE)
    return owner


def _frames(frame: pa.Table) -> tuple[U8, U8, list[str], I32]:
    """(kind; 1 + number of the `CallKind` of an entry of a device's API, 0 none; places; index of
    its place, -1 none), of each frame, and one more for unknown ones."""
    columns = [frame.column(name).to_pylist() for name in ("kind", "function", "binary", "file")]
    lines = frame.column("line").to_pylist()
    count = len(lines)
    kinds = np.zeros(count + 1, np.uint8)
    calls = np.zeros(count + 1, np.uint8)
    place_of = np.full(count + 1, -1, np.int32)
    known: dict[str, int] = {}
    numbers = {one: number for number, one in enumerate(CallKind)}
    for row, (kind, function, binary, file, line) in enumerate(zip(*columns, lines, strict=True)):
        place = ""
        if kind == "python":
            kinds[row] = found = kind_of_file(file, function)
            place = f"{function} {file}:{line}" if file else ""
        elif kind in ("user", "inlined", "jit"):
            kinds[row] = found = kind_of_native(binary, function)
            if found == CodeKind.DEVICE and function:
                call = kind_by_name(function) if _ENTRY.match(function) else CallKind.OTHER
                calls[row] = 0 if call == CallKind.OTHER else 1 + numbers[call]
            place = function if found == CodeKind.OWN_NATIVE else ""
        if place:
            place_of[row] = known.setdefault(place, len(known))
    return kinds, calls, list(known), place_of
