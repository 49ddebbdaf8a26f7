# SPDX-License-Identifier: Apache-2.0
"""A kept incident of a real process, as if it had happened on another node at another time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

KEPT = Path(__file__).parent / "data" / "incidents" / "cpu-quota--opencl.json.gz"


def moved(folder: Path, node: str, began_ns: int) -> Path:
    """Write it to a folder; `began_ns`: since 1970."""
    document = json.loads(gzip.decompress(KEPT.read_bytes()))
    document["node"] = node
    document["wall_offset_ns"] = began_ns - document["incident"]["began_ns"]
    path = folder / f"{node}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path
