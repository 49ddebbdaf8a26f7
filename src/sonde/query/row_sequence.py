# SPDX-License-Identifier: Apache-2.0
"""Rows of an answer that are stored by column, with objects for those that are looked at.

The waits of a busy machine are hundreds of thousands of rows, of which a table shows 30.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Column = npt.NDArray[Any]

_ROWS_AT_ONCE = 2_048
"""Rows whose values are Python objects at the same time when all rows are read one by one."""


class LazyRows(Sequence[T], Generic[T]):
    """A sequence that makes its items when they are looked at."""

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        return self._items(at) if isinstance(at, slice) else self._item(at)

    def __iter__(self) -> Iterator[T]:
        return map(self._item, range(len(self)))

    @abstractmethod
    def _item(self, at: int) -> T:
        """One item. Raises IndexError."""

    def _items(self, part: slice) -> list[T]:
        return [self._item(at) for at in range(*part.indices(len(self)))]


class RowSequence(LazyRows[T]):
    """A sequence that makes its items from columns; equal to a list of the same rows."""

    def __init__(self, make: Callable[..., T], columns: Sequence[Column]) -> None:
        """`make` gets a value of each column, in their order; columns have shape (rows,)."""
        self._make = make
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def _item(self, at: int) -> T:
        return self._make(*(column[at].item() for column in self._columns))

    def __iter__(self) -> Iterator[T]:
        for begin in range(0, len(self), _ROWS_AT_ONCE):
            yield from self._items(slice(begin, begin + _ROWS_AT_ONCE))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list

    def chosen(self, rows: npt.NDArray[np.int64]) -> RowSequence[T]:
        """The rows with these numbers, in their order."""
        return RowSequence(self._make, [column[rows] for column in self._columns])

    @property
    def columns(self) -> Sequence[Column]:
        """What the objects are made of: arrays of shape (rows,), in the order of `make`."""
        return self._columns

    def made_by(self, make: Callable[..., Any]) -> RowSequence[Any]:
        """The same rows as other objects."""
        return RowSequence(make, self._columns)

    def _items(self, part: slice) -> list[T]:
        return [*map(self._make, *(column[part].tolist() for column in self._columns))]


def rounded_sum(column: Column) -> int:
    """The sum of the rounded values, without the rounding of a sum of floats."""
    return sum(map(round, column.tolist()))
