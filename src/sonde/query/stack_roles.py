# SPDX-License-Identifier: Apache-2.0
"""What a thread does, by its stack: prepares and launches work for a device, or runs other code,
and whose.

The frames that the program's innermost own Python frame called decide. Where a stack has no own
Python code (a framework's backward thread, a C++ program), all of its frames do. All columns are
computed for many stacks at once: a capture may have 200,000.

"own" is the program's; kinds of code are `CodeKind`s, of which those that are NEUTRAL (the kernel,
libc, the interpreter) show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sonde.model.libraries import CodeKind
from sonde.model.serving import ACCEPTS, CONNECTION_LOOPS, ServingRole
from sonde.model.spinning import POOLS, SpinningPool
from sonde.model.timeline import (
    I32,
    I64,
    U8,
    Activity,
    CallKind,
    Mask,
    ThreadOwner,
    is_one_of,
)
from sonde.query.frame_roles import CALL_KINDS, TAKES, FrameColumns, frame_columns

ACTIVITIES: tuple[Activity, ...] = tuple(Activity)
"""The activity of each number in columns."""
NUMBER_OF: dict[Activity, int] = {one: number for number, one in enumerate(ACTIVITIES)}
"""The number of each activity in columns."""
_OWNERS = tuple(ThreadOwner)
"""Likewise of owners of threads."""
_ACTIVITY_OF_CALL = {
    CallKind.SYNC: Activity.DEVICE_WAIT,
    CallKind.COPY: Activity.COPY,
    CallKind.ALLOC: Activity.ALLOCATION,
    CallKind.FREE: Activity.ALLOCATION,
    CallKind.PIN: Activity.ALLOCATION,
    CallKind.BUILD: Activity.BUILD,
}
_PYTHON_ROLES = (ServingRole.OTHER_PYTHON, ServingRole.WAITS, *TAKES)
_BLOCK = 8_192
"""Stacks that are looked at together: their columns stay in a processor's cache."""
_CPU_KINDS = (
    *(CodeKind.DEVICE, CodeKind.FRAMEWORK, CodeKind.CPU_KERNEL, CodeKind.COMPILER),
    *(CodeKind.LIBRARY, CodeKind.OWN_NATIVE, CodeKind.OWN_PYTHON, CodeKind.QUEUE),
    CodeKind.STORAGE,
)
"""Kinds of code of which the innermost frame shows what the CPU does."""


@dataclass(frozen=True, slots=True)
class StackRoles:
    """Of each row of the table of stacks, and one more for stacks that are not in it."""

    activity: U8
    """Index into `ACTIVITIES`, for a thread on a CPU."""
    location: I32
    """Index into `locations` of the program's innermost own code, -1 none."""
    locations: list[str]
    """'function file:line', or a function of machine code."""
    caller: I32
    """Index into `locations` of the program's own function around that one, -1 none."""
    in_queue: Mask
    """The stack waits in a queue, a future or a condition."""
    for_room: Mask
    """The stack waits until something is taken from a full queue."""
    in_interpreter: Mask
    """The interpreter itself waits for a condition variable: on Linux, CPython does so for the GIL
    alone."""
    communicates: Mask
    """The stack is in a library that exchanges data with other processes of the job."""
    own_python_innermost: Mask
    """The program's own Python code is innermost; the interpreter and the system do not count."""
    own_native_innermost: Mask
    """The program's own machine code is innermost; libc and the system do not count."""
    computes: Mask
    """The stack is in a library's computation on the CPU, which may run in several threads."""
    compiles: Mask
    """The stack is in a compiler, and in no device's API: it may wait for its workers, or for a
    process."""
    serves: Mask
    """The stack waits, if it does, for the next connection, request or task."""
    service: I32
    """Index into `services` of the code that took the request that the stack answers, or that takes
    the next one; -1 none."""
    services: list[str]
    """Files with such code, below the library's folder."""
    entry: I32
    """Index into `locations` of the program's function that this code called, the outermost one;
    -1 none."""
    reads: Mask
    """That function waits itself, not through others, for what its connection brings."""
    owner: U8
    """1 + the number in `_OWNERS` of the owner that the outermost code belongs to; 0 not known."""
    pool: U8
    """1 + the number in `POOLS` of the pool whose threads the stack waits for by spinning, if it
    is on a CPU; 0 none."""

    def location_of(self, index: int) -> str:
        """The text of an index of `location`; '' for -1."""
        return self.locations[index] if index >= 0 else ""

    def request_of(self, service: int, entry: int) -> tuple[str, str]:
        """The texts of an index of `service`, and of one of `entry` without the line."""
        file = self.services[service] if service >= 0 else ""
        return file, self.location_of(entry).rpartition(":")[0]


class _Stacks(NamedTuple):
    """The frames of all stacks, one after another, innermost first in each."""

    stack: I64
    """The stack of each frame, ascending."""
    size: int
    """Of stacks. Columns of stacks have one more, for unknown ones."""

    def innermost(self, frames: Mask) -> I64:
        """Position of the innermost frame of each stack that is in the mask; the number of all
        frames where none is."""
        found = np.full(self.size + 1, len(self.stack), np.int64)
        positions = np.flatnonzero(frames)
        found[self.stack[positions][::-1]] = positions[::-1]
        return found

    def outermost(self, frames: Mask) -> I64:
        """Likewise of the outermost frame."""
        found = np.full(self.size + 1, len(self.stack), np.int64)
        positions = np.flatnonzero(frames)
        found[self.stack[positions]] = positions  # of several the last one remains
        return found

    def at_outermost(self, frames: Mask, values: U8) -> U8:
        """The value of the outermost frame of each stack that is in the mask; 0 where none is."""
        found = np.zeros(self.size + 1, np.uint8)
        positions = np.flatnonzero(frames)
        found[self.stack[positions]] = values[positions]  # of several the last one remains
        return found

    def have(self, frames: Mask) -> Mask:
        """Whether each stack has a frame that is in the mask."""
        return np.bincount(self.stack[frames], minlength=self.size + 1) > 0


def stack_roles(frame: pa.Table, flat: I32, parents: I32, stacks: int) -> StackRoles:
    """The roles of all stacks.

    `frame`: the table; `flat`: the row in it of each frame of all stacks, innermost first, -1
    unknown; `parents`: the stack of each of these, ascending; `stacks`: the number of stacks.
    """
    table = frame_columns(frame)
    firsts = np.arange(0, max(1, stacks), _BLOCK)
    starts = np.append(np.searchsorted(parents, firsts), len(flat))
    blocks = []
    for first, start, end in zip(firsts.tolist(), starts[:-1], starts[1:], strict=True):
        mine = _Stacks(parents[start:end].astype(np.int64) - first, min(_BLOCK, stacks - first))
        blocks.append(_roles_of(table, flat[start:end], mine))
    if len(blocks) == 1:
        return blocks[0]
    columns: dict[str, Any] = {
        # The last entry of a block is for unknown stacks.
        one.name: np.concatenate(
            [getattr(block, one.name)[: None if block is blocks[-1] else -1] for block in blocks]
        )
        for one in fields(StackRoles)
        if one.name not in ("locations", "services")
    }
    return StackRoles(**columns, locations=table.locations, services=table.services)


def _roles_of(table: FrameColumns, flat: I32, all_stacks: _Stacks) -> StackRoles:
    """The roles of some stacks. `flat`: the row of each of their frames."""
    parents = all_stacks.stack
    none = len(flat)  # the position that `innermost` has for none
    kind, call = table.kind[flat], table.call[flat]  # -1 is the last row: unknown
    own = all_stacks.innermost(kind == CodeKind.OWN_PYTHON)
    has_own = own < none
    position = np.arange(none)
    inside = position < own[parents]
    """Frames that the innermost own Python frame called; all frames of a stack without one."""
    inside_or_own = position <= own[parents]

    def called(*kinds: CodeKind) -> Mask:
        return all_stacks.have(inside & is_one_of(kind, *kinds))

    leaf = all_stacks.innermost(is_one_of(kind, *_CPU_KINDS) & inside_or_own)
    leaf_kind = np.append(kind, np.uint8(CodeKind.NEUTRAL))[leaf]
    in_device, in_framework = called(CodeKind.DEVICE), called(CodeKind.FRAMEWORK)
    computes, compiles = called(CodeKind.CPU_KERNEL), called(CodeKind.COMPILER)
    communicates = called(CodeKind.COMMUNICATION) & ~in_device
    # The outermost entry into the device's API shows what was asked for.
    entry = all_stacks.at_outermost(inside & (kind == CodeKind.DEVICE) & (call > 0), call)
    # Stacks of which only frames of the driver are known.
    driver_only = in_device & ~in_framework & ~has_own & (entry == 0)
    # Where a framework calls another library (an image codec, NumPy), it launches nothing.
    dispatches = in_framework & ~computes & ~called(CodeKind.STORAGE)
    dispatches &= np.isin(leaf_kind, (CodeKind.FRAMEWORK, CodeKind.DEVICE))
    calls = [
        (in_device & (entry == 1 + CALL_KINDS.index(one)) & ~compiles, activity)
        for one, activity in _ACTIVITY_OF_CALL.items()
    ]
    by_priority = [  # the first that applies
        (all_stacks.have(kind == CodeKind.LOADER), Activity.INPUT),
        *calls,
        (compiles, Activity.BUILD),
        (communicates, Activity.COMMUNICATION),
        ((in_device | dispatches) & ~driver_only, Activity.LAUNCH_PATH),
        (driver_only | (leaf == none), Activity.UNKNOWN),
    ]
    activity = np.select(
        [applies for applies, _ in by_priority],
        [NUMBER_OF[one] for _, one in by_priority],
        NUMBER_OF[Activity.CODE],
    )
    waits = inside & (kind == CodeKind.QUEUE) & ~table.is_python[flat]
    native_wait = waits & ~table.in_python_queue[flat]
    other_code = inside & (kind != CodeKind.NEUTRAL) & ~waits
    in_interpreter = all_stacks.have(native_wait) & ~all_stacks.have(other_code) & has_own
    in_queue = all_stacks.have((kind == CodeKind.QUEUE) & inside_or_own)
    in_queue &= ~in_framework & ~in_device  # a framework waits for its own threads
    for_room = _for_room(all_stacks, table, flat, in_queue)
    shown = all_stacks.innermost(kind != CodeKind.NEUTRAL)
    innermost_kind = np.append(kind, np.uint8(CodeKind.NEUTRAL))[shown]
    service, answers, reads = _requests(all_stacks, table, flat)
    return StackRoles(
        activity=activity.astype(np.uint8),
        location=_locations(all_stacks, table, flat, own),
        locations=table.locations,
        caller=_callers(all_stacks, table, flat, own),
        in_queue=in_queue & ~in_interpreter,
        for_room=for_room & ~in_interpreter,
        in_interpreter=in_interpreter,
        communicates=communicates,
        own_python_innermost=has_own & ~all_stacks.have(inside & (kind != CodeKind.NEUTRAL)),
        own_native_innermost=innermost_kind == CodeKind.OWN_NATIVE,
        computes=computes,
        compiles=compiles & ~in_device,
        serves=_serves(all_stacks, table.serving[flat]),
        service=service,
        services=table.services,
        entry=answers,
        reads=reads,
        owner=_owners(all_stacks, kind),
        pool=_pools(all_stacks, table, flat, shown),
    )


def _pools(stacks: _Stacks, table: FrameColumns, flat: I32, innermost: I64) -> U8:
    """`StackRoles.pool`. `innermost`: the position of the innermost frame of each stack that shows
    what it does: libraries compute in other functions than those that wait, or wait by yielding.
    OpenMP's threads are MKL's where that called them."""
    none = np.uint8(0)
    yields = stacks.have(table.is_yield[flat])
    pool = np.append(table.pool[flat], none)[innermost]
    library = np.append(table.library_pool[flat], none)[innermost]
    found = np.where((pool == 0) & yields, library, pool).astype(np.uint8)
    mkl, openmp = (1 + POOLS.index(one) for one in (SpinningPool.MKL, SpinningPool.OPENMP))
    found[(found == openmp) & stacks.have(table.library_pool[flat] == mkl)] = mkl
    return found


def _for_room(stacks: _Stacks, table: FrameColumns, flat: I32, in_queue: Mask) -> Mask:
    """Whether each stack waits for room: in a condition, below a function that puts something into
    a queue; or in that function itself, by a semaphore (`multiprocessing`)."""
    puts = table.puts[flat]
    innermost = stacks.innermost(table.is_python[flat])
    itself = np.append(puts, False)[innermost]
    found: Mask = itself | (in_queue & stacks.have(puts))
    return found


def _serves(stacks: _Stacks, role: U8) -> Mask:
    """Whether each stack waits for the next thing to do: in `accept`, in an event loop of machine
    code, or in Python code that takes the next request or task. `role`: of each frame."""
    is_python = is_one_of(role, *_PYTHON_ROLES)
    innermost = stacks.innermost(is_python & (role != ServingRole.WAITS))
    in_loop = np.append(role, np.uint8(ServingRole.NONE))[innermost] == ServingRole.LOOP
    for_events = stacks.have(role == ServingRole.EVENTS) & ~stacks.have(is_python)
    found: Mask = in_loop | for_events | stacks.have(role == ServingRole.ACCEPT)
    return found


def _requests(stacks: _Stacks, table: FrameColumns, flat: I32) -> tuple[I32, I32, Mask]:
    """(index of the code that took the request of each stack, index of the location of the
    program's function that it called; -1 none; whether that one waits itself on a connection that
    it was given)."""
    takes = stacks.innermost(table.service[flat] >= 0)
    own = (table.kind[flat] == CodeKind.OWN_PYTHON) & table.is_function[flat]
    inside = np.arange(len(flat)) < takes[stacks.stack]
    inside &= takes[stacks.stack] < len(flat)
    entry = stacks.outermost(own & inside)
    none = np.int32(-1)
    service = np.append(table.service[flat], none)[takes]
    accepts = (service < 0) & stacks.have(table.serving[flat] == ServingRole.ACCEPT)
    service = np.where(accepts, table.services.index(ACCEPTS), service).astype(np.int32)
    role = table.serving[flat]
    waiting = is_one_of(role, *_PYTHON_ROLES) & (role != ServingRole.WAITS)
    given = np.array([one in CONNECTION_LOOPS for one in table.services])[service] & (service >= 0)
    reads = given & (entry < len(flat)) & (stacks.innermost(waiting) == entry)
    return service, np.append(table.location[flat], none)[entry], reads


def _locations(stacks: _Stacks, table: FrameColumns, flat: I32, own: I64) -> I32:
    """Index of the location of each stack: of the innermost own Python frame (at the positions
    `own`), else of own machine code, else of a library's Python code, else of a library that
    computes (a thread of its pool has no other code); -1 none."""
    kind = table.kind[flat]
    own_native = stacks.innermost(kind == CodeKind.OWN_NATIVE)
    libraries = (CodeKind.LIBRARY, CodeKind.STORAGE, CodeKind.FRAMEWORK)
    library = stacks.innermost(is_one_of(kind, *libraries))
    location = np.full(stacks.size + 1, -1, np.int32)
    computes = stacks.innermost(kind == CodeKind.CPU_KERNEL)
    for position in (own, own_native, library, computes):
        candidate = np.append(table.location[flat], np.int32(-1))[position]
        location = np.where(location < 0, candidate, location)
    return location


def _callers(stacks: _Stacks, table: FrameColumns, flat: I32, own: I64) -> I32:
    """Index of the location of the own Python function that called the one at the positions `own`,
    directly or not; -1 none. Code of modules (`<module>`) does not count: it calls everything.
    """
    own_function = np.append(table.function[flat], np.int32(-1))[own]
    stack = stacks.stack
    outside = np.arange(len(flat)) > own[stack]
    outside &= (table.kind[flat] == CodeKind.OWN_PYTHON) & table.is_function[flat]
    positions = np.flatnonzero(outside)
    others = table.function[flat[positions]] != own_function[stack[positions]]
    outside[positions[~others]] = False
    return np.append(table.location[flat], np.int32(-1))[stacks.innermost(outside)]


def _owners(stacks: _Stacks, kind: U8) -> U8:
    """1 + the number of each stack's owner, by its outermost code: not by the innermost, since a
    thread of the driver may call functions of the program back."""
    outermost = stacks.at_outermost(kind != CodeKind.NEUTRAL, kind)
    owner = np.where(outermost > 0, 1 + _OWNERS.index(ThreadOwner.PROGRAM), 0).astype(np.uint8)
    owner[outermost == CodeKind.DEVICE] = 1 + _OWNERS.index(ThreadOwner.DRIVER)
    owner[outermost == CodeKind.SONDE] = 1 + _OWNERS.index(ThreadOwner.SONDE)
    return owner
