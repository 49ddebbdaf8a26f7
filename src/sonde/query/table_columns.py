# SPDX-License-Identifier: Apache-2.0
"""A table of an answer as columns of numbers; text once for each value that occurs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def columns(table: pa.Table) -> dict[str, Any]:
    """`rows`: their number; `numbers`: arrays by name, NaN for null; `texts`: by name the distinct
    `values`, and the `index` of each row in these; null is ''."""
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_dictionary(column.type) or pa.types.is_string(column.type):
            if column.null_count:
                column = pc.fill_null(column.cast(pa.string()), "")
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            index = column.indices.to_numpy(zero_copy_only=False)
            texts[name] = {"values": column.dictionary.to_pylist(), "index": index}
        else:
            numbers[name] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return {"rows": table.num_rows, "numbers": numbers, "texts": texts}
