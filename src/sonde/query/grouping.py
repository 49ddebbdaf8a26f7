# SPDX-License-Identifier: Apache-2.0
"""Groups the equal numbers of a column."""

from __future__ import annotations

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
