# SPDX-License-Identifier: Apache-2.0
"""The processes and threads of a capture as columns; objects are made of those that are shown.

A machine that compiles has 100,000 of them in some minutes, and a report shows 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.owner import OWNER_COLUMNS, UNKNOWN, Owner
from sonde.model.process import KTHREADD_PID, Process, Thread
from sonde.query.row_sequence import LazyRows

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class Processes(LazyRows[Process]):
    """Processes by their number; rows of the same owner have one object of it."""

    def __init__(self, table: pa.Table, unnamed: pa.Table) -> None:
        """`table`: a capture's table `process`; `unnamed`: pid and start_ns of those that have
        rows, but none in that table."""
        rows = unnamed.num_rows

        def numbers(name: str, more: npt.ArrayLike) -> npt.NDArray[np.uint64]:
            both: npt.NDArray[np.uint64] = np.concatenate((table.column(name).to_numpy(), more))
            return both

        self.pid: U32 = numbers("pid", unnamed.column("pid").to_numpy()).astype(np.uint32)
        self.start_ns: U64 = numbers("start_ns", unnamed.column("start_ns").to_numpy())
        self.ppid: U32 = numbers("ppid", np.zeros(rows, np.uint32)).astype(np.uint32)
        self._texts: dict[str, list[str]] = {}
        self._codes: dict[str, I32] = {}
        for name in ("comm", "exe", "command"):
            self._texts[name], codes = coded_texts(table.column(name), ("",))
            self._codes[name] = np.concatenate((codes, np.zeros(rows, np.int32)))
        self.owners, owner = _owners(table)
        """Distinct ones."""
        self.owner: I32 = np.concatenate((owner, np.zeros(rows, np.int32)))
        """Index in `owners` of each."""
        self._made: dict[int, Process] = {}

    def __len__(self) -> int:
        return len(self.pid)

    def _item(self, at: int) -> Process:
        made = self._made.get(at)
        if made is None:
            made = self._made[at] = Process(
                self.pid.item(at),
                self.start_ns.item(at),
                self.ppid.item(at),
                self._text("comm", at),
                self._text("exe", at),
                self.owners[self.owner.item(at)],
                self._text("command", at),
            )
        return made

    @cached_property
    def is_kernel(self) -> Mask:
        """As `Process.is_kernel`."""
        mask: Mask = (self.pid == 0) | (self.pid == KTHREADD_PID) | (self.ppid == KTHREADD_PID)
        return mask

    def coded(self, column: str) -> tuple[list[str], I32]:
        """(the distinct texts; of each process, its index in these) of `comm`, `exe`, `command`."""
        return self._texts[column], self._codes[column]

    @cached_property
    def coded_names(self) -> tuple[list[str], I32]:
        """(texts; of each process, the index of its `Process.name` in these)."""
        texts, codes = [*self._texts["command"]], self._codes["command"].copy()
        for column in ("comm", "exe"):
            others, other = self.coded(column)
            missing = _without_text(texts, codes)
            codes[missing] = other[missing] + np.int32(len(texts))
            texts += others
        nameless = np.flatnonzero(_without_text(texts, codes))
        codes[nameless] = np.arange(len(texts), len(texts) + len(nameless), dtype=np.int32)
        texts += [f"pid {pid}" for pid in self.pid[nameless].tolist()]
        return texts, codes

    @cached_property
    def names(self) -> list[str]:
        """As `Process.name`."""
        texts, codes = self.coded_names
        return [*map(texts.__getitem__, codes.tolist())]

    @cached_property
    def runs_script(self) -> Mask:
        """Whether each is an interpreter of which it is known what it runs."""
        return ~_without_text(*self.coded("command"))

    def number_of(self, process: Process) -> int:
        """The number of a process."""
        return self._numbers[process.pid, process.start_ns]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        keys = zip(self.pid.tolist(), self.start_ns.tolist(), strict=True)
        return {key: number for number, key in enumerate(keys)}

    def _text(self, name: str, at: int) -> str:
        return self._texts[name][self._codes[name].item(at)]


class Threads(LazyRows[Thread]):
    """Threads by their number."""

    def __init__(self, processes: Processes, table: pa.Table, seen: pa.Table) -> None:
        """`table`: a capture's table `thread`; `seen`: tid, number of the process, and row in
        `table` (-1: none) of each thread."""
        self._processes = processes
        self.tid: U32 = seen.column("tid").to_numpy()
        self.process: I64 = seen.column("process").to_numpy().astype(np.int64)
        """Index in `Session.processes` of each."""
        self._comms, of_row = coded_texts(table.column("comm"), ("",))
        # One more, for -1.
        self._comm: I32 = np.append(of_row, np.int32(0))[seen.column("row").to_numpy()]
        self._made: dict[int, Thread] = {}

    def __len__(self) -> int:
        return len(self.tid)

    def _item(self, at: int) -> Thread:
        made = self._made.get(at)
        if made is None:
            process = self._processes[self.process.item(at)]
            comm = self._comms[self._comm.item(at)]
            made = self._made[at] = Thread(process, self.tid.item(at), comm)
        return made

    @cached_property
    def is_kernel(self) -> Mask:
        """Whether each is of the kernel's (`Process.is_kernel`)."""
        return self._processes.is_kernel[self.process]

    def name_of(self, number: int) -> str:
        """The name of one thread."""
        comm = self._comms[self._comm.item(number)]
        is_unnamed = not comm or self._is_first_of_script.item(number)
        return self._processes[self.process.item(number)].name if is_unnamed else comm

    @cached_property
    def coded_names(self) -> tuple[list[str], I32]:
        """(texts; of each thread, the index of its `Thread.name` in these)."""
        names, of_process = self._processes.coded_names
        codes = self._comm.astype(np.int32)
        missing = _without_text(self._comms, codes) | self._is_first_of_script
        codes[missing] = of_process[self.process[missing]] + np.int32(len(self._comms))
        return [*self._comms, *names], codes

    @cached_property
    def _is_first_of_script(self) -> Mask:
        """Which threads are called as their process (`Thread.name`)."""
        is_first: Mask = self.tid == self._processes.pid[self.process]
        return is_first & self._processes.runs_script[self.process]

    @cached_property
    def names(self) -> list[str]:
        """As `Thread.name`."""
        texts, codes = self.coded_names
        return [*map(texts.__getitem__, codes.tolist())]


def coded_texts(column: pa.ChunkedArray, first: tuple[str, ...] = ()) -> tuple[list[str], I32]:
    """(the distinct texts, after those of `first`; for each row, its index in these)."""
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    codes: I32 = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    return [*first, *encoded.dictionary.to_pylist()], codes + np.int32(len(first))


def _without_text(texts: Sequence[str], codes: I32) -> Mask:
    """Which rows have the text ''."""
    empty: Mask = np.array([not text for text in texts], bool)[codes]
    return empty


def _owners(table: pa.Table) -> tuple[list[Owner], I32]:
    """(`UNKNOWN` and the distinct owners of a table of processes; each row's index in these)."""
    group = np.zeros(table.num_rows, np.int64)
    for name in OWNER_COLUMNS:
        encoded = table.column(name).combine_chunks().dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        # Numbered again after each column: a product of all their numbers could overflow.
        group = np.unique(group * (len(encoded.dictionary) + 1) + codes, return_inverse=True)[1]
    first = np.unique(group, return_index=True)[1]
    columns = []
    for name in OWNER_COLUMNS:
        values = pc.take(table.column(name), pa.array(first)).to_pylist()
        columns.append(values)
    owners = [UNKNOWN, *(Owner(*about) for about in zip(*columns, strict=True))]
    return owners, group.astype(np.int32) + np.int32(1)
