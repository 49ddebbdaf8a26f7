# SPDX-License-Identifier: Apache-2.0
"""A capture's tables in an embedded SQL engine, beside lists of its stacks, threads and processes.

Tables that queries may read:
- `sample`, `activity` and `device_run` as in a chunk, with the columns `thread`, `process` and (not
  `activity`) `stack`: indices into the lists;
- `usage` with the column `process`; `event` and `metric` as in a chunk;
- `single_wait`: the waits among the rows of `span` (`single_waits`);
- `process` and `thread`: the identity of each entry of the lists;
- `leaf`: the index in `Session.functions` of each stack's innermost function, once
  `index_functions` was called.
The SQL is limited to what both DuckDB and Spark support.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.limits import most_bytes
from sonde.model.code import NO_STACK, Frame, Hide, Stacks
from sonde.query.capture import Capture, CaptureInfo, engine_bytes
from sonde.query.frame_columns import FrameColumns
from sonde.query.hidden_frames import bytes_needed, with_stand_in, without_frames
from sonde.query.identities import OF_PROCESSES, OF_THREADS, Identities, identities
from sonde.query.known_threads import Processes, Threads
from sonde.query.probe_frames import without_probe_frames
from sonde.query.single_waits import single_waits
from sonde.query.user_frames import user_frames, waits_of_sonde

_ROWS_AT_ONCE = 2_048
"""Rows that are fetched together: memory is accounted for between."""

I32 = npt.NDArray[np.int32]
FunctionKey = tuple[str, str, str]
"""(name, binary, source file)"""


def _result_bytes(columns: int) -> int:
    """Memory for a row of a result and for the object made of it."""
    return 128 + 48 * columns


def _with_shared_texts(
    row: tuple[Any, ...], at: Sequence[int], texts: dict[str, str]
) -> tuple[Any, ...]:
    """The row with equal texts (in the columns `at`) replaced by one shared object."""
    values = list(row)
    for number in at:
        text = values[number]
        values[number] = texts.setdefault(text, text)
    return tuple(values)


class Session:
    """Runs SQL over one capture. Not thread-safe."""

    def __init__(self, capture: Capture, hide: Hide | None = None) -> None:
        """`hide`: the frames that are left out of all stacks."""
        self.info: CaptureInfo = capture.info
        self.hide = hide
        self._budget = capture.budget
        tables = capture.tables
        # Spill files have predictable names: never in a directory that other users may write to.
        spill = tempfile.mkdtemp(prefix="sonde-query-")
        self._remove_spill = weakref.finalize(self, shutil.rmtree, spill, ignore_errors=True)
        # No extension is downloaded or loaded: a report works without a network.
        self._connection = duckdb.connect(
            config={
                # Beyond this the engine spills to disk.
                "memory_limit": f"{engine_bytes(most_bytes()) >> 10}KiB",
                "temp_directory": spill,
                # Sums of floats depend on their order: with one thread they are always the same.
                "threads": 1,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self._connection.register("event", tables["event"])
        self._connection.register("metric", tables["metric"])
        frame = tables["frame"]
        self.frames = FrameColumns(with_stand_in(frame) if hide else frame)
        """As `stacks.frames`."""
        self.stacks, replacements = without_probe_frames(
            _stacks(tables["stack"], frame, self.frames)
        )
        shown = np.arange(len(self.stacks), dtype=np.int32)
        if hide:
            shown = self._leave_out(hide)
        found = identities(tables)
        self.processes = Processes(tables["process"], found.unnamed)
        self.threads = Threads(self.processes, tables["thread"], found.threads)
        for name in OF_PROCESSES:
            table = tables[name].append_column("process", pa.array(found.process_of[name]))
            if name in OF_THREADS:
                table = table.append_column("thread", pa.array(found.thread_of[name]))
            if "stack_id" in table.column_names:
                table = _with_stack(table, tables["stack"], replacements, shown)
            self._connection.register(name, table)
        single = single_waits(tables["span"])
        self.hold(single.nbytes)
        self._connection.register("single_wait", single)
        self._register_lists(found)
        self._functions_indexed = False
        self._user_code_indexed = False

    def _leave_out(self, hide: Hide) -> I32:
        """Replace the stacks by those without some frames; return the number in these of each."""
        self.hold(needed := bytes_needed(self.stacks))
        # Known by frames that may be left out.
        of_sonde = waits_of_sonde(self.stacks, user_frames(self.stacks))
        self.stacks, number, self.waits_of_sonde = without_frames(
            self.stacks, self.frames, hide, of_sonde
        )
        self.hold(-needed)
        return number

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return its rows as tuples. Raises CaptureError as `arrow` does."""
        found: list[tuple[Any, ...]] = []
        # The engine makes a new string object for each row; one for equal texts is enough.
        texts: dict[str, str] = {}
        with self._engine_errors():
            result = self._connection.execute(sql, parameters)
            at = [number for number, one in enumerate(result.description) if one[1] == "STRING"]
            while batch := result.fetchmany(_ROWS_AT_ONCE):
                self.hold(len(batch) * _result_bytes(len(result.description)))
                if at:
                    batch = [_with_shared_texts(row, at, texts) for row in batch]
                found += batch
        return found

    def arrow(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run a query and return its rows as columns.

        Raises CaptureError where sums overflow, because the capture has impossible numbers.
        """
        with self._engine_errors():
            table = self._connection.sql(sql, params=parameters).to_arrow_table()
        self.hold(table.nbytes + table.num_rows * _result_bytes(table.num_columns))
        return table

    def hold(self, count_bytes: int) -> None:
        """Account for memory that a result is about to use. Raises CaptureTooLarge."""
        if self._budget is not None:
            self._budget.hold(count_bytes)

    @contextlib.contextmanager
    def _engine_errors(self) -> Iterator[None]:
        try:
            yield
        except (duckdb.OutOfRangeException, duckdb.ConversionException) as error:
            raise CaptureError(
                f"{self.info.path} has impossible numbers: {str(error).splitlines()[0][:120]}",
                "get it again from its source, or record again",
            ) from error
        except duckdb.OutOfMemoryException as error:
            raise CaptureTooLarge(
                f"{self.info.path} needs more memory and disk space to read than there is",
                f"free some space in {tempfile.gettempdir()}, or record for a shorter time",
            ) from error

    @cached_property
    def user_frames(self) -> npt.NDArray[np.int64]:
        """Each stack's frame of the user's Python code (`model.user_code`), as an index into
        `stacks.frames`; -1 none; shape (stacks,)."""
        return user_frames(self.stacks)

    @cached_property
    def waits_of_sonde(self) -> npt.NDArray[np.bool_]:
        """For each stack: whether Sonde's own library waits there; shape (stacks,)."""
        return waits_of_sonde(self.stacks, self.user_frames)

    @cached_property
    def functions(self) -> Sequence[FunctionKey]:
        """Every function of the capture, and that of an empty stack."""
        return self._numbered_functions[0]

    @cached_property
    def function_of_frame(self) -> npt.NDArray[np.int32]:
        """For each frame of `stacks.frames` the index of its function in `functions`; one more
        entry at the end is for an empty stack; shape (frames + 1,)."""
        return self._numbered_functions[1]

    @cached_property
    def _numbered_functions(self) -> tuple[list[FunctionKey], npt.NDArray[np.int32]]:
        numbers: dict[FunctionKey, int] = {}
        columns = ("function", "binary", "file")
        first, of_frame = self.frames.distinct(columns)
        texts = [self.frames.texts_of(column, first) for column in columns]
        frames = [
            Frame("", name, binary, file=file) for name, binary, file in zip(*texts, strict=True)
        ]
        of_key = [
            numbers.setdefault((frame.name, frame.binary, frame.file), len(numbers))
            for frame in (*frames, NO_STACK)
        ]
        return list(numbers), np.array(of_key, np.int32)[np.append(of_frame, len(frames))]

    def index_functions(self) -> None:
        """Create the table `leaf`, once."""
        if not self._functions_indexed:
            self._index_functions()
            self._functions_indexed = True

    def _register_lists(self, found: Identities) -> None:
        process = {
            "process": pa.array(np.arange(len(self.processes), dtype=np.int32)),
            "pid": pa.array(self.processes.pid),
            "start_ns": pa.array(self.processes.start_ns),
        }
        self._connection.register("process", pa.table(process))
        number = pa.array(np.arange(len(self.threads), dtype=np.int32))
        columns = found.threads.drop_columns(["row"]).add_column(0, "thread", number)
        self._connection.register("thread", columns)

    def index_user_code(self) -> None:
        """Make the table `user_code` for queries: by stack, the number of the user's function that
        it is in (`functions`); a negative one, different for each, where there is none."""
        if self._user_code_indexed:
            return
        self._user_code_indexed = True
        stack = np.arange(len(self.stacks), dtype=np.int32)
        frame = self.user_frames
        of_frame = np.asarray(self.function_of_frame, np.int32)
        code = np.where(frame >= 0, of_frame[frame], -1 - stack).astype(np.int32)
        self._connection.register("user_code", pa.table({"stack": stack, "code": code}))

    def _index_functions(self) -> None:
        of_frame = np.asarray(self.function_of_frame, np.int32)
        offsets = np.asarray(self.stacks.offsets, np.int64)
        leaves = np.full(len(self.stacks), of_frame[-1], np.int32)
        nonempty = np.flatnonzero(np.diff(offsets))
        flat = np.asarray(self.stacks.frame_indices, np.int32)
        leaves[nonempty] = of_frame[flat[offsets[nonempty]]]
        stack = np.arange(len(self.stacks), dtype=np.int32)
        self._connection.register("leaf", pa.table({"stack": stack, "function": leaves}))


def _stacks(stack: pa.Table, frame: pa.Table, frames: FrameColumns) -> Stacks:
    """Stacks numbered from 0: the empty stack, then those of the table in its order."""
    column, ids = stack.column("frame_ids"), frame.column("frame_id")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    offsets = np.zeros(len(lengths) + 2, np.int32)
    np.cumsum(lengths, out=offsets[2:])
    flat = np.empty(offsets[-1], np.int32)
    at = 0
    for chunk in column.chunks:  # each by itself: together they need a multiple of the memory
        some = pc.fill_null(pc.index_in(chunk.flatten(), value_set=ids), len(frames) - 1)
        flat[at : at + len(some)] = some.to_numpy()
        at += len(some)
    return Stacks(frames=frames, offsets=offsets.data, frame_indices=flat.data)


def _with_stack(rows: pa.Table, stack: pa.Table, wait_stacks: I32, shown: I32) -> pa.Table:
    """Replace `stack_id` by the index of the stack, 0 where it is missing.

    `wait_stacks`: for each stack, the one to use in rows of waits (`without_probe_frames`);
    `shown`: for each of all these, the one that it is then (`without_frames`).
    """
    number = pc.index_in(rows.column("stack_id"), value_set=stack.column("stack_id"))
    number = pc.fill_null(pc.add(number, 1), 0)
    waits = pc.is_in(rows.column("kind"), value_set=pa.array(["blocked", "runqueue"]))
    number = pc.if_else(waits, pc.take(pa.array(wait_stacks), number), number)
    number = pc.take(pa.array(shown), number)
    return rows.drop_columns(["stack_id"]).append_column("stack", number)
