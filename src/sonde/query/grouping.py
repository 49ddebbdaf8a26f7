# SPDX-License-Identifier: Apache-2.0
"""Groups the equal numbers of a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64 = npt.NDArray[np.int64]


def grouped(keys: I64) -> tuple[I64, I64]:
    """(the distinct keys in order of appearance; for each key, its index in those).

    There may be no nulls. `numpy.unique` sorts, and takes several times as long.
    """
    encoded = pa.array(keys).dictionary_encode()
    distinct: I64 = encoded.dictionary.to_numpy()
    return distinct, encoded.indices.to_numpy().astype(np.int64)


def grouped_rows(columns: Sequence[npt.NDArray[np.integer]]) -> tuple[I64, I64]:
    """(the first row with each combination of numbers, in order of appearance; for each row, the
    index of its combination in those).

    `columns`: at least one, all of the same length, of numbers from 0 to 2^31 - 1.
    """
    index = columns[0].astype(np.int64)
    for column in columns[1:]:
        _, index = grouped((index << 32) | column)
    distinct, index = grouped(index)
    first = np.empty(len(distinct), np.int64)
    first[index[::-1]] = np.arange(len(index))[::-1]
    return first, index
