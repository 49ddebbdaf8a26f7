# SPDX-License-Identifier: Apache-2.0
"""Incidents that `sonde diagnose --keep` wrote, for the page. Read-only."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from sonde.diagnose.recorded import Headline, headline
from sonde.errors import CaptureError
from sonde.export.strict_json import dumps
from sonde.input_files import open_input

SUFFIX = ".json.gz"
MAX_FILES = 300
"""The newest ones; the answer has how many more there are."""
MAX_BYTES = 64 << 20
"""Of one, decompressed; `sonde incidents` has the same limit."""


def listed(folder: Path | None) -> bytes:
    """JSON: `shown` (whether there is a folder), `incidents` (the newest first; times in ns since
    1970), `older` and `unreadable` (numbers of files)."""
    files: list[tuple[int, Path]] = []
    try:
        for path in folder.iterdir() if folder else ():
            if path.name.endswith(SUFFIX):
                files.append((path.lstat().st_mtime_ns, path))
    except OSError:
        folder = None
    files.sort(reverse=True)
    found: list[dict[str, Any]] = []
    unreadable = 0
    for modified_ns, path in files[:MAX_FILES]:
        one = _read(path)
        if one is None:
            unreadable += 1
        else:
            found.append(_document(one, modified_ns, path.name))
    found.sort(key=lambda one: -one["noticed_ns"])
    return dumps(
        {
            "shown": folder is not None,
            "incidents": found,
            "older": max(0, len(files) - MAX_FILES),
            "unreadable": unreadable,
        }
    ).encode()


def _read(path: Path) -> Headline | None:
    try:
        with open_input(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            raw = unpacked.read(MAX_BYTES + 1)
        return headline(raw) if len(raw) <= MAX_BYTES else None
    except (OSError, EOFError, zlib.error, ValueError, CaptureError):
        return None


def _document(one: Headline, modified_ns: int, name: str) -> dict[str, Any]:
    import msgspec

    incident = one.incident
    # Files without an offset were written when the incident was explained.
    offset_ns = one.wall_offset_ns or modified_ns - incident.explained_ns
    found: dict[str, Any] = json.loads(msgspec.json.encode(incident))
    found["verdict"]["cause"] = str(incident.verdict.cause)
    for key in ("began_ns", "noticed_ns", "explained_ns"):
        found[key] += offset_ns
    return found | {"id": name.removesuffix(SUFFIX), "node": one.node}
