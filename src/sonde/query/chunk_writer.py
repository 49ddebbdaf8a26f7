# SPDX-License-Identifier: Apache-2.0
"""Encodes tables as a chunk in Python, for those who do not load the native module. framing.py has
the layout."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from sonde.query import framing


def chunk_of(meta: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> bytes:
    """The bytes of a chunk. `meta`: its metadata without `tables` and `raw_len`."""
    parts = []
    entries = []
    offset = 0
    for name, table in sorted(tables.items()):
        fields = [one.with_type(_without_dictionary(one.type)) for one in table.schema]
        table = table.cast(pa.schema(fields))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        part = sink.getvalue().to_pybytes()
        entry = {"name": name, "offset": offset, "length": len(part), "rows": table.num_rows}
        entries.append(entry)
        parts.append(part)
        offset += len(part)
    payload: bytes = pa.compress(b"".join(parts), codec="zstd", asbytes=True)
    text = json.dumps({**meta, "tables": entries, "raw_len": offset}).encode()
    head = framing.CHUNK_HEADER.pack(
        framing.CHUNK_MAGIC, framing.VERSION, 0, len(text), zlib.crc32(text), len(payload),
        zlib.crc32(payload), 0,
    )[:-4]  # fmt: skip
    return bytes(head + struct.pack("<I", zlib.crc32(head)) + text + payload)


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary encoding, which readers refuse (`messages`)."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind
