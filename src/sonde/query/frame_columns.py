# SPDX-License-Identifier: Apache-2.0
"""The frames of a capture as columns; objects are made of those that are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.model.code import Frame
from sonde.query.grouping import grouped_rows
from sonde.query.known_threads import coded_texts
from sonde.query.row_sequence import LazyRows

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UNKNOWN_FRAME = Frame(kind="unknown", function="", binary="[unknown]")

_TEXTS = ("kind", "function", "binary", "build_id", "file", "origin")


class FrameColumns(LazyRows[Frame]):
    """The rows of a capture's table `frame`, and `UNKNOWN_FRAME` after them."""

    def __init__(self, table: pa.Table) -> None:
        self._texts: dict[str, list[str]] = {}
        self._codes: dict[str, I32] = {}
        for name in _TEXTS:
            # The first text is that of the frame after the last row.
            texts, codes = coded_texts(table.column(name), (getattr(UNKNOWN_FRAME, name),))
            self._texts[name], self._codes[name] = texts, np.append(codes, np.int32(0))
        self._lists = [*self._texts.values()]
        self._by_row = np.stack([*self._codes.values()], axis=1)
        self.offset = np.append(table.column("offset").to_numpy(), np.uint64(0))
        self.line = np.append(table.column("line").to_numpy(), np.uint32(0))
        """`Frame.offset` and `Frame.line` of each."""
        self._made: list[Frame | None] = [None] * len(self.line)

    def __len__(self) -> int:
        return len(self.line)

    def _item(self, at: int) -> Frame:
        frame = self._made[at]
        if frame is None:
            codes = self._by_row[at].tolist()
            kind, function, binary, build_id, file, origin = map(
                list.__getitem__, self._lists, codes
            )
            offset, line = self.offset.item(at), self.line.item(at)
            frame = Frame(kind, function, binary, build_id, offset, file, line, origin)
            self._made[at] = frame
        return frame

    def having(self, column: str, test: Callable[[str], bool]) -> Mask:
        """Which frames have a text in a column that the test is true of."""
        return np.array([test(text) for text in self._texts[column]], bool)[self._codes[column]]

    def texts_of(self, column: str, frames: I64) -> list[str]:
        """The texts of some frames in a column."""
        return [*map(self._texts[column].__getitem__, self._codes[column][frames].tolist())]

    def names_of(self, frames: I64) -> list[str]:
        """`Frame.name` of some frames."""
        functions, binaries = self.texts_of("function", frames), self.texts_of("binary", frames)
        return [
            function or Frame("", function, binary).name
            for function, binary in zip(functions, binaries, strict=True)
        ]

    def distinct(self, columns: Sequence[str]) -> tuple[I64, I64]:
        """(frames, the first with each combination of texts in the columns; for each frame, the
        index of its combination in these)."""
        return grouped_rows([self._codes[column] for column in columns])


def frames_having(frames: Sequence[Frame], column: str, test: Callable[[str], bool]) -> Mask:
    """For each frame, whether it has a text that the test is true of; shape (frames,).

    `column`: a field of `Frame`.
    """
    if isinstance(frames, FrameColumns):
        return frames.having(column, test)
    return np.fromiter((test(getattr(frame, column)) for frame in frames), bool, len(frames))
