# SPDX-License-Identifier: Apache-2.0
"""What runs leave, packed: so that they are scored again where there is no GPU."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

PART_BYTES = 15_000_000
"""Of one archive; a run is never cut."""


def shrink(folder: Path, **measured: float) -> None:
    """Compress a run's trace; of the trace without the cause only what was `measured` stays."""
    truth = folder / "truth.json"
    truth.write_text(json.dumps(json.loads(truth.read_text()) | measured))
    (folder / "off.json").unlink(missing_ok=True)
    trace = folder / "trace.json"
    if trace.exists():
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", 6) as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()


def pack(paths: Iterable[Path], out: Path, name: str = "runs") -> list[Path]:
    """Folders and files into `out`/`name`-00.tar and so on."""
    out.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for path in paths:
        if not made or made[-1].stat().st_size > PART_BYTES:
            made.append(out / f"{name}-{len(made):02}.tar")
            made[-1].unlink(missing_ok=True)
        with tarfile.open(made[-1], "a") as archive:
            archive.add(path, path.name)
    return made
