# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.sizes`: bytes a row of what real agents recorded, after compaction.

Each recording of tests/data with samples or timed kernels is stored once, as a separate node; so
stacks and weights repeat as rarely as they do in some seconds of a program, and an hour of one
takes less a row. Zstandard of the chunks as they were sent is given beside it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from io import BytesIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from bench.service.queries import sizes
from sonde.query import framing
from sonde.store import compaction
from sonde.store.catalog import Catalog
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.wal import Wal
from stored_chunks import DATA, as_of

AIMS = {"device_run": 17, "sample": 5}
"""Most bytes a row."""
AT_NS = 1_800_001_800 * 10**9
_LEFT_OUT = ("fuzz", "incidents", "stacks", "vdaf")
"""Folders without recordings of programs."""


def chunks_of(path: Path) -> list[bytes]:
    """The chunks of a recording."""
    content = path.read_bytes()
    found, at = [], framing.FILE_HEADER.size
    for chunk in framing.chunks(BytesIO(content), len(content)):
        if isinstance(chunk, framing.RawChunk):
            found.append(content[at : chunk.end])
            at = chunk.end
    return found


def main() -> int:
    """Run, print JSON; 1 where an aim is missed."""
    sent = 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        catalog = Catalog(store)
        for path in sorted(DATA.rglob("*.sonde")):
            if set(path.relative_to(DATA).parts) & set(_LEFT_OUT):
                continue
            node = path.relative_to(DATA).with_suffix("").as_posix().replace("/", "-")
            wal = Wal(store / "wal")
            for number, chunk in enumerate(chunks_of(path)):
                body = as_of(chunk, node, number, AT_NS + number * 5 * 10**9)
                sent += len(body)
                digest = digest_of("default", node, body)
                wal.append(Record("default", node, digest, AT_NS, body)).result(60)
            wal.close()
        Flusher(store, catalog).flush()
        compaction.COMPACTED_FROM = 1
        compaction.compact(store, catalog)
        catalog.close()
        tables = sizes(store)
    result = {
        "sent_bytes": sent,
        "stored_bytes": sum(one["bytes"] for one in tables.values()),
        "aims_bytes_a_row": AIMS,
        "tables": tables,
    }
    print(json.dumps(result, indent=2))
    return int(any(tables[name]["bytes_a_row"] > most for name, most in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
