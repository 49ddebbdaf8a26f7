# SPDX-License-Identifier: Apache-2.0
"""Reads a capture file into one set of columnar tables.

Chunks repeat the dictionary rows (stack, frame, process, thread) that they need; here every key
appears once. Rows of the other tables are concatenated. Whatever could not be read is counted in
`CaptureInfo`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from sonde.errors import CaptureError, CaptureTooLarge, CaptureTruncated
from sonde.input_files import open_input
from sonde.limits import JSON_BYTES, Budget, is_plausible, most_bytes
from sonde.model.program_run import ProgramRun
from sonde.query import framing, lengths, messages, validation
from sonde.query.chunk_metadata import (
    CHUNK_BYTES,
    About,
    DamagedChunkError,
    Gate,
    Known,
    Listed,
    chunk_meta,
    damage,
    listed,
)
from sonde.query.merging import Merge
from sonde.query.schema import TABLES, conform

__all__ = [
    "Capture",
    "CaptureInfo",
    "DamagedChunkError",
    "Progress",
    "chunk_meta",
    "conformed",
    "damage",
    "engine_bytes",
    "read",
    "streams_of",
]

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total)."""

_PIPE_BYTES = 1 << 20
"""Size of one read from a pipe."""
_ENGINE_BYTES = 1 << 30
"""Most memory that the SQL engine gets."""
_FIXED_BYTES = 56 << 20
"""Memory for buffers of Arrow, the SQL engine and the writers, for any capture."""
_GROUP_BYTES = 16 << 20
"""Chunks are checked and merged together up to this decompressed size."""


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """Metadata of a capture, and how much of the file could be read."""

    path: Path
    size_bytes: int
    id: str
    """Of the recording, as its writer chose it; may be empty."""
    version: str
    """Version of Sonde that made the recording."""
    host: dict[str, Any]
    """What the recorder wrote about its machine (`cpus`, `hz`, ...): not checked, except that it is
    an object and not nested deeper than `chunk_metadata.MAX_NESTED`."""
    start_ns: int
    """CLOCK_MONOTONIC, as `end_ns`."""
    end_ns: int
    paused_ns: int
    """Time between them in which the recorder was paused."""
    wall_offset_ns: int
    """CLOCK_MONOTONIC plus this is the time since 1970."""
    chunks: int
    chunks_damaged: int
    """Unreadable parts of the file: chunks whose checksums or content are wrong, and other bytes
    between chunks."""
    chunks_missing: int
    """Numbers missing from the sequence of chunks, less the damaged parts."""
    damaged_bytes: int
    tail_bytes: int
    """Bytes at the end that are no whole chunk: an unfinished one, if the recorder was killed."""
    clean_end: bool
    """The recorder closed the file; it was not killed."""
    rows_refused: int = 0
    """Rows with impossible numbers (NaN, infinite, far too large), left out."""
    names_cut: int = 0
    """Texts that were longer than `limits.MAX_NAME_CHARS`."""
    program: ProgramRun | None = None
    """The program that was recorded from its start to its end."""

    @property
    def duration_ns(self) -> int:
        """Length of the recording, pauses left out."""
        return max(0, self.end_ns - self.start_ns - self.paused_ns)

    @property
    def cpus(self) -> int:
        """CPUs of the machine, 0 unknown."""
        return _positive(self.host.get("cpus"))

    @property
    def hz(self) -> int:
        """Samples per second on each CPU, 0 unknown."""
        return _positive(self.host.get("hz"))


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture in memory: `tables` has every table of `schema.TABLES`, empty ones included."""

    info: CaptureInfo
    tables: dict[str, pa.Table]
    budget: Budget | None = None
    """Memory used for reading so far; large results are accounted for here, too."""


def read(path: Path, on_progress: Progress | None = None, without: Collection[str] = ()) -> Capture:
    """Read a capture file. Tables named in `without` are skipped and stay empty.

    Raises CaptureError (NotACapture, CaptureTruncated, CaptureTooNew, CaptureTooLarge) where
    nothing can be read; damage that leaves something readable is reported in the `info` of the
    result.
    """
    try:
        with open_input(path) as file:
            if not file.seekable():
                with _spooled(file, path) as spooled:
                    return _read(spooled, path, on_progress, without)
            return _read(file, path, on_progress, without)
    except FileNotFoundError:
        raise CaptureError(
            f"{path} does not exist", "check the path, or record one with `sonde record`"
        ) from None
    except PermissionError:
        raise CaptureError(
            f"{path} may not be read by this user",
            f"make it readable, e.g. `sudo chown $USER {path}`",
        ) from None
    except OSError as error:
        raise CaptureError(
            f"{path} cannot be read: {error.strerror or error}",
            "check the path and its disk",
        ) from error
    except ValueError as error:  # A NUL byte in the path.
        raise CaptureError(f"{str(path)!r} is not a path: {error}", "check the path") from error


def _spooled(stream: BinaryIO, path: Path) -> BinaryIO:
    """What comes through a pipe, in a temporary file. Raises CaptureTooLarge, OSError."""
    limit_bytes = most_bytes()
    spooled = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        while block := stream.read(_PIPE_BYTES):
            if spooled.tell() + len(block) > limit_bytes:
                raise CaptureTooLarge(
                    f"more than {limit_bytes / 1e9:.3g} GB came through {path}",
                    "write the recording to a file first",
                )
            spooled.write(block)
    except BaseException:
        spooled.close()
        raise
    return spooled


def engine_bytes(limit_bytes: int) -> int:
    """The part of the memory limit for a file that the SQL engine gets; beyond that it uses the
    disk."""
    return min(_ENGINE_BYTES, limit_bytes // 4)


def _read(
    file: BinaryIO, path: Path, on_progress: Progress | None, without: Collection[str]
) -> Capture:
    size_bytes = file.seek(0, 2)
    file.seek(0)
    framing.check_file_header(file.read(framing.FILE_HEADER.size), str(path))
    budget = Budget(str(path), size_bytes)
    budget.hold(engine_bytes(budget.limit_bytes) + min(_FIXED_BYTES, budget.limit_bytes // 4))
    merge = Merge(budget)
    known = Known()
    damaged = damaged_bytes = tail_bytes = rows_refused = names_cut = 0
    group: list[_Unpacked] = []

    def merge_group() -> None:
        nonlocal damaged, damaged_bytes, rows_refused, names_cut
        for checked in _checked(group, budget):
            if isinstance(checked, _Unpacked):
                damaged += 1
                damaged_bytes += checked.size_bytes
                continue
            for about in checked.abouts:
                known.add(about)
            rows_refused += checked.rows_refused
            names_cut += checked.names_cut
            for name, table in checked.tables.items():
                merge.add(name, table)
        budget.hold(-sum(len(one.about.raw) for one in group))
        group.clear()

    with ThreadPoolExecutor(1, "decompress") as pool:
        group_bytes = 0
        for chunk in _ahead(file, size_bytes, budget, pool):
            if isinstance(chunk, framing.BadChunk):
                if chunk.at_end:
                    tail_bytes = chunk.size_bytes
                else:
                    damaged += 1
                    damaged_bytes += chunk.size_bytes
                continue
            try:
                tables = chunk.tables(budget, without)
            except DamagedChunkError:
                damaged += 1
                damaged_bytes += chunk.size_bytes
                budget.hold(-len(chunk.about.raw))
                continue
            group.append(_Unpacked(chunk.about, tables, chunk.size_bytes))
            group_bytes += chunk.about.raw_len + len(chunk.about.raw) + CHUNK_BYTES
            if group_bytes > _GROUP_BYTES:
                merge_group()
                group_bytes = 0
            if on_progress:
                on_progress(chunk.end, size_bytes)
        merge_group()
    last = known.last
    if last is None:
        lost = f"{damaged} damaged" if damaged else "cut before its first one was whole"
        raise CaptureTruncated(
            f"{path} holds no readable chunk ({lost})",
            "record again; `sonde record` writes a chunk every few seconds",
        )
    missing = max(0, max(known.numbers) + 1 - len(known.numbers) - damaged)
    budget.hold(JSON_BYTES * len(last.raw))
    capture = chunk_meta(last.raw)["capture"]
    info = CaptureInfo(
        path=path,
        size_bytes=size_bytes,
        id=str(capture.get("id", "")),
        version=str(capture.get("version", "")),
        host=capture["host"],
        start_ns=known.start_ns,
        end_ns=known.end_ns,
        paused_ns=known.paused_ns,
        wall_offset_ns=last.wall_offset_ns,
        chunks=known.chunks,
        chunks_damaged=damaged,
        chunks_missing=missing,
        damaged_bytes=damaged_bytes,
        tail_bytes=tail_bytes,
        clean_end=last.is_last and not tail_bytes,
        rows_refused=rows_refused,
        names_cut=names_cut,
        program=_program(capture["host"].get("program")),
    )
    tables = merge.tables()
    pa.default_memory_pool().release_unused()  # of the decompressed chunks
    return Capture(info, tables, budget)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk that another thread decompresses."""

    about: About
    raw: Future[pa.Buffer]
    payload_bytes: int
    end: int
    """Where it ends in the file."""

    @property
    def size_bytes(self) -> int:
        """Of its metadata and payload in the file."""
        return len(self.about.raw) + self.payload_bytes

    def tables(self, budget: Budget, without: Collection[str]) -> dict[str, pa.Table]:
        """With the columns that their writer gave them (see `conformed`), but for those named in
        `without`. Gives back what its payload holds. Raises DamagedChunkError, CaptureTooLarge."""
        with damage():
            try:
                raw = self.raw.result()
            finally:
                budget.hold(-self.payload_bytes)
            return {
                name: messages.read_streams([one], TABLES[name].names, budget.hold)[0]
                for name, one in _streams_in(self.about.tables, raw, without).items()
            }


def _ahead(
    file: BinaryIO, size_bytes: int, budget: Budget, pool: ThreadPoolExecutor
) -> Iterator[_Begun | framing.BadChunk]:
    """The chunks of a file, each while the next is decompressed. Raises CaptureTooLarge."""
    before: _Begun | framing.BadChunk | None = None
    gate = Gate(budget)
    for chunk in framing.chunks(file, size_bytes, gate.admit):
        now: _Begun | framing.BadChunk
        if isinstance(chunk, framing.BadChunk):
            gate.refuse()
            now = chunk
        else:
            about = gate.take()
            budget.unpack(about.raw_len)
            raw = pool.submit(_decompressed, chunk, about.raw_len)
            now = _Begun(about, raw, len(chunk.payload), chunk.end)
        if before is not None:
            yield before
        before = now
    if before is not None:
        yield before


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A chunk's tables with the columns that its writer gave them."""

    about: About
    tables: dict[str, pa.Table]
    size_bytes: int
    """Of its metadata and payload in the file."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Tables of some chunks, joined and conformed (`conformed`)."""

    abouts: list[About]
    tables: dict[str, pa.Table]
    rows_refused: int
    names_cut: int


def _checked(group: Sequence[_Unpacked], budget: Budget) -> Iterator[_Checked | _Unpacked]:
    """The tables of all chunks joined. Where that fails, because a chunk is damaged or chunks have
    different columns: those of each chunk, and a damaged chunk as `_Unpacked`. Raises
    CaptureTooLarge."""
    held_bytes = budget.held_bytes
    try:
        if group:
            yield _checked_together(group, budget)
        return
    except DamagedChunkError:
        if len(group) == 1:
            yield group[0]
            return
    # Give back what the failed attempt was charged: each chunk is charged for its part below.
    budget.hold(held_bytes - budget.held_bytes)
    for chunk in group:
        yield from _checked([chunk], budget)


def _checked_together(group: Sequence[_Unpacked], budget: Budget) -> _Checked:
    """Raises DamagedChunkError, CaptureTooLarge."""
    tables = {}
    refused = names_cut = 0
    for name in TABLES:
        parts = [chunk.tables[name] for chunk in group if name in chunk.tables]
        if not parts:
            continue
        try:
            table = pa.concat_tables(parts).combine_chunks()
        except (pa.ArrowException, ValueError) as error:
            raise DamagedChunkError(str(error)) from error
        tables[name], left_out, cut = conformed(name, table, budget)
        refused += left_out
        names_cut += cut
    return _Checked([chunk.about for chunk in group], tables, refused, names_cut)


def streams_of(
    chunk: framing.RawChunk, budget: Budget, without: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, messages.Stream]]:
    """(metadata, tables as undecoded Arrow IPC streams whose messages were checked) of a chunk.

    Tables named in `without` are left out. Raises DamagedChunkError, CaptureTooLarge.
    """
    meta = chunk_meta(chunk.meta)
    if not is_plausible(meta["raw_len"], len(chunk.payload)):
        raise DamagedChunkError("it decompresses to an implausible size")
    budget.unpack(meta["raw_len"])
    with damage():
        raw = _decompressed(chunk, meta["raw_len"])
        return meta, _streams_in(listed(meta), raw, without)


def _decompressed(chunk: framing.RawChunk, raw_len: int) -> pa.Buffer:
    """Raises what `damage` turns into DamagedChunkError."""
    raw = pa.decompress(chunk.payload, decompressed_size=raw_len, codec="zstd")
    if chunk.has_lengths:
        lengths.restore(raw)
    return raw


def _streams_in(
    listed: Sequence[Listed], raw: pa.Buffer, without: Collection[str]
) -> dict[str, messages.Stream]:
    """Raises what `damage` turns into DamagedChunkError, and that."""
    streams: dict[str, messages.Stream] = {}
    for one in listed:
        if one.name in without:
            continue
        if not 0 <= one.offset <= one.offset + one.length <= raw.size:
            raise DamagedChunkError(f"table {one.name} lies outside its payload")
        streams[one.name] = messages.checked(raw.slice(one.offset, one.length))
    return streams


def conformed(name: str, table: pa.Table, budget: Budget) -> tuple[pa.Table, int, int]:
    """(the table with the columns of `schema.TABLES`, number of refused rows, number of cut names).

    `table` may have the rows of several chunks. Columns whose names begin with `carry_` are the
    caller's and are kept as they are: a server's store notes there which chunk a row is from.
    Raises DamagedChunkError, CaptureTooLarge.
    """
    carried = [column for column in table.column_names if column.startswith("carry_")]
    with damage():
        validation.check_columns(name, table)
        budget.hold(validation.casting_bytes(name, table))
        table, cut = validation.truncate_names(table)
        budget.hold(validation.repeated_bytes(table))
        fitting = conform(name, table)
        for column in carried:
            fitting = fitting.append_column(column, table.column(column))
        fitting, left_out = validation.valid_rows(name, fitting)
    return fitting, left_out, cut


def _program(raw: object) -> ProgramRun | None:
    """A program's run as the recorder wrote it; None where it is missing or impossible."""
    names = [field.name for field in dataclasses.fields(ProgramRun)]
    if not isinstance(raw, dict) or not raw.keys() >= set(names):
        return None
    numbers = [raw[name] for name in names]
    if not all(type(number) is int and abs(number) < 1 << 62 for number in numbers):
        return None
    run = ProgramRun(*numbers)
    times = (run.wall_ns, run.user_ns, run.system_ns, run.peak_rss_bytes)
    return run if min(times) >= 0 and -128 < run.status < 256 else None


def _positive(value: object) -> int:
    """The value, 0 where it is no positive 32-bit integer."""
    return value if isinstance(value, int) and 0 < value < 1 << 31 else 0
