# SPDX-License-Identifier: Apache-2.0
"""Which rows of several columns of whole numbers are equal.

`numpy.unique(…, axis=0)` compares rows as records: for 300,000 rows it takes seconds, and no other
thread runs meanwhile. Here the columns become one, of numbers that NumPy sorts without its lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
_MOST = 1 << 62
"""Combined numbers are below it, so that they fit into an int64."""


def distinct_rows(columns: Sequence[npt.ArrayLike]) -> tuple[I64, I64]:
    """(the distinct rows, in order of their first column, then the second, …; for each row, its
    index in those).

    `columns`: at least one, all of the same length (n,), of whole numbers that fit into an int64.
    Returns shapes (distinct, columns) and (n,).
    """
    kept = [np.asarray(column).astype(np.int64) for column in columns]
    combined, count = np.zeros(len(kept[0]), np.int64), 1
    for column in kept:
        # Both keep the order of what they number.
        numbers, values = _from_zero(column)
        if count * values >= _MOST:
            combined, count = _numbered(combined)
            numbers, values = _numbered(column)
        combined, count = combined * values + numbers, count * values
    found, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    rows = np.stack([column[first] for column in kept], axis=1)
    return rows.reshape(len(found), len(kept)), inverse.reshape(-1).astype(np.int64)


def _from_zero(column: I64) -> tuple[I64, int]:
    """(numbers from 0 on in the order of the values, how many there may be)."""
    if not len(column):
        return column, 1
    least, most = int(column.min()), int(column.max())
    if most - least + 1 >= _MOST:
        return _numbered(column)
    return column - least, most - least + 1


def _numbered(column: I64) -> tuple[I64, int]:
    """(the number of each value among the different ones, how many those are)."""
    found, inverse = np.unique(column, return_inverse=True)
    return inverse.reshape(-1).astype(np.int64), max(1, len(found))
