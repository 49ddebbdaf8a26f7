# SPDX-License-Identifier: Apache-2.0
"""Columns of a capture converted for a timeline: indices of threads and names, frames in stacks.

A *track* is here always a thread; `naming` gives each thread and name its index in the timeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.interner import Interner
from sonde.model.timeline import I32, I64, U8, Mask
from sonde.query.stack_roles import StackRoles, stack_roles

_BLOCK = 1 << 18
"""Frames that are looked at together."""
_MANY_PARTS = 64
"""Of the table of stacks: more are joined first."""
_COLUMNS_KEPT = 4
"""Columns of stacks of which `Frames` keeps the rows."""


class ThreadTracks:
    """Maps columns of pid and tid to the indices of threads in a timeline."""

    def __init__(
        self,
        naming: Interner,
        tables: Mapping[str, pa.Table],
        kernel_threads: Mapping[int, str] | None = None,
    ) -> None:
        """`kernel_threads`: names of some without rows, by id."""
        self._naming = naming
        thread, process = tables["thread"], tables["process"]
        ids = zip(*(thread.column(name).to_pylist() for name in ("pid", "tid")), strict=True)
        self._comm = dict(zip(ids, thread.column("comm").to_pylist(), strict=True))
        self._comm_of_tid: dict[int, str] = {}
        self._pid_of_tid: dict[int, int] = {}
        for (pid, tid), comm in self._comm.items():
            self._comm_of_tid.setdefault(tid, comm)
            self._pid_of_tid.setdefault(tid, pid)
        columns = ("pid", "comm", "exe", "command")
        names = (process.column(name).to_pylist() for name in columns)
        self._process: dict[int, str] = {}
        inherited: set[tuple[int, str]] = set()
        for pid, comm, exe, command in zip(*names, strict=True):
            self._process[pid] = command or comm or exe
            if command and (pid, pid) in self._comm:  # as `Thread.name`
                self._comm[pid, pid] = self._comm_of_tid[pid] = command
                inherited.add((pid, comm))
        for (pid, tid), comm in self._comm.items():
            if tid != pid and (pid, comm) in inherited:  # not a name that anybody gave it
                self._comm[pid, tid] = self._process[pid]
        for tid, name in (kernel_threads or {}).items():
            if self._comm_of_tid.setdefault(tid, name) == name:
                self._comm[tid, tid] = name
                self._pid_of_tid[tid] = tid

    def comm(self, tid: int) -> str:
        """'name (tid)' of a thread, '' for tid 0."""
        if not tid:
            return ""
        name = self._comm_of_tid.get(tid) or self._process.get(tid) or "tid"
        return f"{name} ({tid})"

    def of_tid(self, tid: int) -> int:
        """Index of the thread with this id; -1 for one that is not in the capture. Of several
        threads that had the id one after another: the first."""
        pid = self._pid_of_tid.get(tid)
        if pid is None:
            return -1
        process = self._process.get(pid, "")
        return self._naming.thread(pid, tid, self._comm.get((pid, tid), ""), process)

    def of_rows(self, table: pa.Table, prefix: str = "") -> I32:
        """Index of the thread of each row, from the columns pid and tid with a `prefix`."""
        pids, tids = int64_column(table, f"{prefix}pid"), int64_column(table, f"{prefix}tid")
        keys, inverse = np.unique((pids << 32) | tids, return_inverse=True)
        numbers = [
            self._naming.thread(
                int(key >> 32),
                int(key & 0xFFFFFFFF),
                self._comm.get((int(key >> 32), int(key & 0xFFFFFFFF)), ""),
                self._process.get(int(key >> 32), ""),
            )
            for key in keys
        ]
        tracks: I32 = np.array(numbers or [0], np.int32)[inverse]
        return tracks

    def wakers(self, spans: pa.Table) -> I64:
        """Index of the thread that ended each span, plus 1; 0 unknown."""
        found = np.zeros(spans.num_rows, np.int64)
        known = np.flatnonzero(int64_column(spans, "waker_tid"))
        found[known] = self.of_rows(spans.take(pa.array(known)), "waker_") + 1
        return found


class Frames:
    """Answers which stacks of a capture contain which frames."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        frame, stack = tables["frame"], tables["stack"]
        self._frame = frame
        self._ids = stack.column("stack_id")
        self._flat, lengths = _rows_in(frame, stack.column("frame_ids"))
        """The row in `frame` of each frame of all stacks, innermost first; -1 unknown."""
        self._parents: I32 = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        """The stack of each of these, ascending."""
        self._function = frame.column("function")
        self._kind = frame.column("kind")
        self._rows_found: list[tuple[Any, I64]] = []

    @cached_property
    def roles(self) -> StackRoles:
        """What a thread in each stack does, by row of the table of stacks (`row_of`)."""
        return stack_roles(self._frame, self._flat, self._parents, len(self._ids))

    @cached_property
    def leaves(self) -> I64:
        """The row in `frame` of the innermost frame of each row of the table of stacks, and of one
        more; -1 none."""
        found = np.full(len(self._ids) + 1, -1, np.int64)
        found[self._parents[::-1]] = self._flat[::-1]
        return found

    def code(self, row: int) -> tuple[str, str, str]:
        """(kind, function, binary) of a row of `frame`."""
        kind, function, binary = (
            self._frame.column(name)[row].as_py() or "" for name in ("kind", "function", "binary")
        )
        return kind, function, binary

    def row_of(self, stack_ids: Any) -> I64:
        """The row of each stack in the table of stacks; one past the last for unknown ones."""
        for known, rows in self._rows_found:
            if len(known) == len(stack_ids) and known.equals(stack_ids):
                return rows
        at = pc.fill_null(pc.index_in(stack_ids, value_set=self._ids), len(self._ids))
        rows = np.asarray(at.to_numpy(), np.int64)
        # The same columns are asked for again and again.
        self._rows_found = [(stack_ids, rows), *self._rows_found[: _COLUMNS_KEPT - 1]]
        return rows

    def holding(self, stack_ids: Any, functions: tuple[str, ...]) -> Mask:
        """Whether each stack contains one of the functions, of the kernel or of a library.

        Python frames do not count: a function of the program may have the same name.
        """
        named = pc.is_in(self._function, value_set=pa.array(functions))
        named = pc.and_(named, pc.not_equal(self._kind, "python"))
        return self._stacks_with(named)[self.row_of(stack_ids)]

    def within(self, function: str) -> Mask:
        """Whether each row of the table of stacks contains a Python function ('name file'); one
        more entry, False, is for unknown stacks."""
        return self._stacks_with(pc.equal(self._python_functions, function))

    def holding_each(self, functions: Sequence[str]) -> list[Mask]:
        """For each of at most 64 functions, Python's ('name file') or of machine code:
        whether each row of the table of stacks, and one more, contains it."""
        held = np.zeros(self._frame.num_rows + 1, np.uint64)
        is_native = pc.not_equal(self._kind, "python")
        for number, function in enumerate(functions):
            native = pc.and_(pc.equal(self._function, function), is_native)
            named = pc.or_kleene(native, pc.equal(self._python_functions, function))
            held[np.append(_true_in(named), False)] |= np.uint64(1 << number)
        found = np.zeros(len(self._ids) + 1, np.uint64)
        for part in self._blocks():
            bits = held[self._flat[part]]
            positions = np.flatnonzero(bits)
            np.bitwise_or.at(found, self._parents[part][positions], bits[positions])
        return [(found >> np.uint64(one)) & np.uint64(1) > 0 for one in range(len(functions))]

    @cached_property
    def _python_functions(self) -> Any:
        """'name file' of each row of the table of frames; null of other frames."""
        file = self._frame.column("file").cast(pa.string())
        texts = pc.binary_join_element_wise(self._function.cast(pa.string()), file, " ")
        return pc.if_else(pc.equal(self._kind, "python"), texts, None)

    def _stacks_with(self, frames: Any) -> Mask:
        """Whether each row of the table of stacks, and one more, contains one of the rows of the
        table of frames in the mask `frames`."""
        found = np.zeros(len(self._ids) + 1, bool)
        wanted = np.append(_true_in(frames), False)
        if wanted.any():
            found[self._parents[wanted[self._flat]]] = True
        return found

    def functions(self, naming: Interner, stack_ids: Any) -> I32:
        """Index of the name of each stack's innermost function with a name outside the kernel."""
        is_named = pc.and_(pc.not_equal(self._kind, "kernel"), pc.not_equal(self._function, ""))
        wanted = np.append(_true_in(is_named), False)
        leaf = np.full(len(self._ids) + 1, -1, np.int32)
        for part in reversed([*self._blocks()]):  # one may begin within a stack
            flat = self._flat[part]
            positions = np.flatnonzero(wanted[flat])[::-1]
            leaf[self._parents[part][positions]] = flat[positions]  # the last one remains
        rows, inverse = np.unique(leaf[self.row_of(stack_ids)], return_inverse=True)
        texts = [""] * np.count_nonzero(rows < 0)  # in order: without a name comes first
        if len(known := rows[len(texts) :]):
            texts += self._function.take(pa.array(known)).to_pylist()
        found: I32 = np.array([naming.name(text) for text in texts], np.int32)[inverse]
        return found

    def _blocks(self) -> Iterator[slice]:
        """Parts of all frames that stay in a processor's cache."""
        for start in range(0, len(self._flat), _BLOCK):
            yield slice(start, start + _BLOCK)


def _rows_in(frame: pa.Table, lists: pa.ChunkedArray) -> tuple[I32, I64]:
    """(the row in the table of frames of each frame of all stacks, -1 unknown; how many each stack
    has), part by part: the ids of all stacks take twice the memory of what is made from them."""
    lengths: I64 = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    flat = np.empty(int(lengths.sum()), np.int32)
    known, at = frame.column("frame_id"), 0
    for part in lists.chunks if lists.num_chunks <= _MANY_PARTS else [lists.combine_chunks()]:
        rows = pc.fill_null(pc.index_in(part.flatten(), value_set=known), -1).to_numpy()
        flat[at : at + len(rows)] = rows
        at += len(rows)
    return flat, lengths


def _true_in(mask: Any) -> Mask:
    """A column of booleans as a mask; nulls are False."""
    found: Mask = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return found


def int64_column(rows: pa.Table, column: str) -> I64:
    """A column of integers as int64."""
    return np.asarray(rows.column(column).to_numpy(), np.int64)


def texts_of(rows: pa.Table, column: str) -> list[str]:
    """The texts of a dictionary-encoded column; equal texts are one object."""
    texts = rows.column(column).combine_chunks()
    known = texts.dictionary.to_pylist()
    return [known[number] for number in texts.indices.to_pylist()]


def names_of(naming: Interner, rows: pa.Table, column: str) -> I32:
    """Indices, in the timeline, of the texts of a dictionary-encoded column."""
    texts = rows.column(column).combine_chunks()
    known = [naming.name(text) for text in texts.dictionary.to_pylist()]
    numbers: I32 = np.array(known or [0], np.int32)[texts.indices.to_numpy()]
    return numbers


def codes_of(rows: pa.Table, column: str, codes: dict[str, int]) -> U8:
    """The code of each text of a dictionary-encoded column; 0 for texts that have none."""
    texts = rows.column(column).combine_chunks()
    known = [codes.get(text, 0) for text in texts.dictionary.to_pylist()]
    numbers: U8 = np.array(known or [0], np.uint8)[texts.indices.to_numpy()]
    return numbers


def blocks_of(rows: pa.Table) -> I32:
    """Thread blocks of each kernel, the product of its grid, at most 2^31 - 1; 0 unknown."""
    grids = texts_of(rows, "grid")
    known: dict[str, int] = {}
    for grid in set(grids):
        try:
            known[grid] = min(math.prod(int(part) for part in grid.split(",")), (1 << 31) - 1)
        except ValueError:
            known[grid] = 0
    return np.array([known[grid] for grid in grids], np.int32)
