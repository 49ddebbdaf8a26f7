# SPDX-License-Identifier: Apache-2.0
"""Strings, mappings, functions and locations of a pprof profile, each written once.

They get their numbers in the order of the samples that need them first. Fields are those of
`pprof_profile.proto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.export.pprof_profile_pb2 import Profile
from sonde.export.protobuf_columns import content, messages, number_fields
from sonde.export.stack_frames import first_of_each
from sonde.model.code import NO_STACK
from sonde.query.session import Session

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_ADDRESS, _LINE = 3, 4
"""Numbers of fields of `Location`; those of `Function` are 1 to 4."""
_ROUGH_BYTES = 8
"""What a location counts for, and a string as its multiple."""
_NO_LIMIT = np.uint64((1 << 64) - 1)


class Added(NamedTuple):
    """Fields of the profile that samples need."""

    rows: I64
    """The first sample that needs each, ascending."""
    fields: pa.Array
    sizes: I64
    """Rough ones, in bytes, by which it is decided when a message is written."""

    def needed_by(self, rows: slice) -> bytes:
        """The fields that some samples need, one after another."""
        begin, end = np.searchsorted(self.rows, (rows.start, rows.stop)).tolist()
        return content(self.fields.slice(begin, end - begin))


class NewFrames(NamedTuple):
    """Frames without a location so far."""

    frames: I64
    rows: I64
    """The first sample that has each, ascending."""


class Strings:
    """The table of strings."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._added: list[tuple[int, bytes, int]] = []

    def number(self, text: str, row: int = 0) -> int:
        """The number of a text, which that sample needs. Rows ascend."""
        number = self.numbers.get(text)
        if number is None:
            number = self.numbers[text] = len(self.numbers)
            self._added.append((row, text.encode(errors="replace"), len(text)))
        return number

    def added(self) -> Added:
        """Those that are new since the last call."""
        rows, texts, chars = zip(*self._added, strict=True) if self._added else ((), (), ())
        self._added.clear()
        fields = messages(Profile.STRING_TABLE_FIELD_NUMBER, pa.array(texts, pa.binary()))
        sizes = np.array(chars, np.int64) // _ROUGH_BYTES * _ROUGH_BYTES
        return Added(np.array(rows, np.int64), fields, sizes)


class Code:
    """Mappings, functions and locations of a capture's frames, and of one after the last, which
    stands for no frames."""

    def __init__(self, session: Session, strings: Strings) -> None:
        self._session = session
        self._strings = strings
        frames = session.frames
        first, index = frames.distinct(("binary", "build_id"))
        known: dict[tuple[str, str], int] = {}
        texts = (frames.texts_of("binary", first), frames.texts_of("build_id", first))
        keys = [*zip(*texts, strict=True), (NO_STACK.binary, NO_STACK.build_id)]
        codes = np.array([known.setdefault(key, len(known)) for key in keys])
        self._binaries = [*known]
        self._binary: I64 = codes[np.append(index, len(first))]
        """Index in `_binaries` of each frame."""
        self._limit: U64 = np.zeros(len(known), np.uint64)
        """Of each binary, the address after the last."""
        self._mapping: I64 = np.zeros(len(known), np.int64)
        """Number of the mapping of each binary; 0 none yet, as in the next two."""
        self._function: I64 = np.zeros(len(session.functions), np.int64)
        self.location: I64 = np.zeros(len(frames) + 1, np.int64)
        """Number of the location of each frame."""
        self._offset = np.append(frames.offset, np.uint64(0))
        self._line = np.append(frames.line, np.uint32(0))

    def name(self, new: NewFrames, others: Sequence[tuple[int, Sequence[str]]]) -> Added:
        """Give mappings and functions their numbers, and all that new samples need their strings:
        of each sample first those of its frames, then `others`: (sample, texts), ascending.

        Returns the new functions.
        """
        uses = [(row, len(new.rows), at, -1) for at, (row, _) in enumerate(others)]
        for which, (numbers, codes) in enumerate(self._numbered(new)):
            fresh, first = first_of_each(codes, numbers[codes] == 0)
            by = (new.rows[first].tolist(), first.tolist(), [which] * len(first), fresh.tolist())
            uses += zip(*by, strict=True)
        found: list[tuple[int, int, int, int]] = []
        functions = int(self._function.max())
        number = self._strings.number
        for row, _, which, code in sorted(uses):
            if code < 0:
                for text in others[which][1]:
                    number(text, row)
            elif which:
                functions += 1
                self._function[code] = functions
                name, _, file = self._session.functions[code]
                found.append((row, functions, number(name, row), number(file, row)))
            else:
                self._mapping[code] = int(self._mapping.max()) + 1
                for text in self._binaries[code]:
                    number(text, row)
        rows, *columns = np.array(found, np.int64).reshape(-1, 4).T
        ids, names, files = columns
        parts = (number_fields(at + 1, one) for at, one in enumerate((ids, names, names, files)))
        fields = messages(Profile.FUNCTION_FIELD_NUMBER, *parts)
        return Added(rows, fields, np.zeros(len(rows), np.int64))

    def locate(self, new: NewFrames) -> Added:
        """The locations of new frames, whose mappings and functions have numbers."""
        binary, address = self._binary[new.frames], self._offset[new.frames]
        after = np.where(address < _NO_LIMIT, address + np.uint64(1), address)
        np.maximum.at(self._limit, binary, after)
        (mappings, _), (functions, code) = self._numbered(new)
        fields = messages(
            Profile.LOCATION_FIELD_NUMBER,
            number_fields(1, self.location[new.frames]),
            number_fields(2, mappings[binary]),
            number_fields(_ADDRESS, address),
            messages(
                _LINE,
                number_fields(1, functions[code]),
                number_fields(2, self._line[new.frames]),
            ),
        )
        return Added(new.rows, fields, np.full(len(new.rows), _ROUGH_BYTES))

    def _numbered(self, new: NewFrames) -> tuple[tuple[I64, I64], tuple[I64, I64]]:
        """(numbers by code, codes of the new frames) of mappings and of functions."""
        functions = self._session.function_of_frame[new.frames].astype(np.int64)
        return (self._mapping, self._binary[new.frames]), (self._function, functions)

    def mappings(self) -> bytes:
        """All mappings, whose lengths are known once all locations are.

        Addresses are offsets in the file, so each starts at 0 and ends after the greatest of them.
        Names are resolved already: pprof need not search for files.
        """
        used = np.flatnonzero(self._mapping)
        profile = Profile()
        for code in used[np.argsort(self._mapping[used])].tolist():
            filename, build_id = map(self._strings.number, self._binaries[code])
            profile.mapping.add(
                id=int(self._mapping[code]),
                memory_limit=int(self._limit[code]),
                filename=filename,
                build_id=build_id,
                has_functions=True,
                has_filenames=True,
                has_line_numbers=True,
                has_inline_frames=True,
            )
        return profile.SerializeToString()
